"""The language-model studies: their YAML, their texts, and small ones run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import warm

from dualform.store.recording import Recording

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
COMMAND = EXPERIMENTS / "language_model.py"
sys.path.insert(0, str(EXPERIMENTS))

from runner import lm_ask, lm_config, lm_text, lm_train  # noqa: E402
from runner.config import ConfigError  # noqa: E402

STUDIES = ("aesop_lm", "wikitext_lm")


def test_the_full_variants_are_the_papers() -> None:
    aesop = lm_config.load(EXPERIMENTS / "aesop_lm.yaml").variants["full"]
    assert (aesop.embedding, aesop.projection, aesop.hidden) == (64, 1024, 1024)
    assert (aesop.batch, aesop.time, aesop.steps) == (64, 100, 5000)
    assert (aesop.lr, aesop.l2, aesop.clip, aesop.dropout) == (1e-3, 1e-7, 1.0, 0.0)
    wikitext = lm_config.load(EXPERIMENTS / "wikitext_lm.yaml").variants["full"]
    assert (wikitext.embedding, wikitext.projection, wikitext.hidden) == (200, None, 200)
    assert (wikitext.batch, wikitext.time, wikitext.steps) == (128, 100, 10_000)
    assert (wikitext.lr, wikitext.l2, wikitext.clip, wikitext.dropout) == (3e-3, 1e-7, 0.3, 0.5)
    assert wikitext.tokens is None
    assert aesop.tokens is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("text: aesop", "text: bible", "must be one of aesop, wikitext-2"),
        ("default: scaled", "default: huge", "must be one of scaled, full, tiny"),
        ("hidden: 128", "hidden: 0", "scaled.hidden must be at least 1"),
        ("hidden: 128", "hiden: 128", "unknown key 'hiden'"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (EXPERIMENTS / "aesop_lm.yaml").read_text()
    assert old in text
    path = tmp_path / "study.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        lm_config.load(path)


def test_wikitext_is_the_standard_one(data_dir: Path) -> None:
    text = lm_text.load("wikitext-2", data_dir, None)
    assert (len(text.training), len(text.test)) == (2_088_628, 245_569)
    assert len(text.vocabulary) == 33_278


def test_aesop_is_split_by_characters(data_dir: Path) -> None:
    text = lm_text.load("aesop", data_dir, None)
    content = (data_dir / "aesop" / "fables.txt").read_text(encoding="utf-8")
    joined = "".join(text.vocabulary[i] for i in [*text.training.tolist(), *text.test.tolist()])
    assert joined == content
    assert len(text.test) == 17_751


def test_a_passage_marks_its_token() -> None:
    text = lm_text.Text(torch.arange(5), torch.arange(5), ["a", "<", "c", "d", "\n"])
    passage = lm_text.passage(text, text.training, 1, 2)
    assert passage.plain() == "a⟦<⟧cd"
    assert passage.html() == "a<mark>&lt;</mark>cd"
    assert passage.terminal() == "a\033[7m<\033[0mcd"
    assert lm_text.passage(text, text.training, 4, 2).plain() == "cd⟦⏎⟧"


@pytest.mark.parametrize("name", STUDIES)
def test_scores_are_those_of_all_stored_keys(name: str, tmp_path: Path, data_dir: Path) -> None:
    """Against a third training whose keys are all on disk, added up in float64."""
    study = lm_config.load(EXPERIMENTS / f"{name}.yaml")
    variant = study.variants["tiny"]
    text = lm_text.load(study.text, data_dir, variant.tokens)
    answers, facts = lm_ask.run(study, variant, text)

    trained = lm_train.train(variant, text, study.seed, tmp_path / "recording")
    recording = Recording.open(tmp_path / "recording")
    absolute = np.zeros((len(answers), len(text.training)))
    signed = np.zeros_like(absolute)
    queries = []
    for answer in answers:
        part = text.test if answer.part == "test" else text.training
        prompt = part[answer.position - study.queries.prompt + 1 : answer.position + 1]
        with torch.no_grad():
            inputs = trained.model.inputs(prompt[None])
            queries.append(trained.model.rnn.gate_keys(inputs)[0, -1].double().numpy())
    windows = lm_train.windows(len(text.training), variant)
    for record, (offsets, _) in zip(recording.passes("rnn"), windows, strict=True):
        keys = np.empty((record.rows, facts.key), np.float32)
        recording.read_keys(record, keys)
        weights = np.stack(queries) @ keys.astype(np.float64).T
        np.add.at(absolute.T, offsets.ravel().numpy(), np.abs(weights).T)
        np.add.at(signed.T, offsets.ravel().numpy(), weights.T)
    for number, answer in enumerate(answers):
        for matches, sums in ((answer.absolute, absolute), (answer.signed, signed)):
            best = np.argsort(-sums[number], kind="stable")[: study.queries.top]
            assert [match.position for match in matches] == best.tolist()
            np.testing.assert_allclose(
                [match.score for match in matches], sums[number][best], rtol=1e-5
            )
    assert facts.rows == variant.steps * variant.batch * variant.time


def test_the_command_leaves_what_people_look_at(tmp_path: Path, data_dir: Path) -> None:
    words = ["--data", data_dir, "--out", tmp_path, "--variant", "tiny"]
    done = warm.run_file(COMMAND, EXPERIMENTS / "aesop_lm.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert "\033[7m" in done.stdout
    found = json.loads((tmp_path / "lm_aesop.json").read_text())
    assert found["variant"] == "tiny"
    assert len(found["answers"]) == 5
    assert "<mark>" in (tmp_path / "lm_aesop.html").read_text()
    page = (tmp_path / "lm_aesop.md").read_text()
    assert "Scaled down" in page
    assert "--variant tiny" in page


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    words = ["--data", tmp_path, "--out", tmp_path, "--variant", "huge"]
    done = warm.run_file(COMMAND, EXPERIMENTS / "aesop_lm.yaml", *words)
    assert done.returncode == 2
    assert "there are scaled, full, tiny" in done.stderr
