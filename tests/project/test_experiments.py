"""The studies: their YAML, the authors' split of MNIST, and a small one run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

from runner import config, images, measure, report, table1, votes  # noqa: E402

Sets = dict[str, tuple[images.Images, images.Images]]


@pytest.fixture(scope="module")
def sets(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Training and test images by task; read-only."""
    scratch = tmp_path_factory.mktemp("sets")
    return {task: images.load(data_dir, scratch, task) for task in ("mnist", "fashion")}


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = (EXPERIMENTS / "mnist_tiny.yaml").read_text()
    assert old in text
    path = tmp_path / "study.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_mnist_single_is_the_papers_size() -> None:
    study = config.load(EXPERIMENTS / "mnist_single.yaml")
    assert study.rows == 640_000
    assert study.hidden == (800, 800)
    assert study.variants["code"].momentum == 0.9
    assert study.variants["paper"] == config.Variant(0.03, 1.0, 1e-4, 1e-5)


def test_the_studies_of_images_differ_where_the_paper_says() -> None:
    single = config.load(EXPERIMENTS / "mnist_single.yaml")
    table = config.load(EXPERIMENTS / "mnist_table1.yaml")
    joint = config.load(EXPERIMENTS / "joint.yaml")
    continual = config.load(EXPERIMENTS / "continual.yaml")
    assert single.phases == table.phases
    assert single.variants == table.variants
    assert len(table.seeds) == 5
    assert table.votes == config.Votes(images=10_000)
    assert joint.phases == (config.Phase(("mnist", "fashion"), 5000),)
    assert continual.phases == (config.Phase(("mnist",), 3000), config.Phase(("fashion",), 3000))
    for study in (single, table, joint, continual):
        assert (study.hidden, study.batch_size) == ((800, 800), 128)
        assert study.variants["code"] == single.variants["code"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: [0]", "seeds: [0]\nsedes: [1]", "unknown key 'sedes'"),
        ("seeds: [0]", "", "no key 'seeds'"),
        ("seeds: [0]", "seeds: []", "seeds is empty"),
        ("tasks: [mnist]", "tasks: [cifar]", "tasks must hold some of mnist, fashion"),
        ("tasks: [mnist]", "tasks: mnist", "tasks must be a list"),
        ("steps: 200", "steps: 2.5", "steps is 2.5; it must be of type int"),
        ("steps: 200", "steps: true", "steps is True; it must be of type int"),
        ("steps: 200", "steps: 0", "steps is 0; at least 1"),
        ("lr: 3.0e-3", "lr: 3e-3", "YAML needs a dot"),
        ("images: 100", "images: 100\n  nprobe: 8", "unknown key 'nprobe'"),
        ("  paper:", "  ../paper:", "names a folder"),
        ("hidden: [64, 64]", "hidden: 64", "hidden must be a list"),
        ("name: mnist_tiny", "name: [", "while parsing"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as refusal:
        config.load(edited(tmp_path, old, new))
    assert message in str(refusal.value)


@pytest.mark.slow
def test_a_wrong_study_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    study = edited(tmp_path, "steps: 200", "steps: many")
    done = run(study, tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_batches_cross_epoch_borders_and_repeat_nothing_within_an_epoch() -> None:
    plan = images.batches(n=100, size=32, steps=10, random=np.random.default_rng(0))
    assert plan.shape == (10, 32)
    stream = plan.ravel()
    for epoch in range(3):
        assert sorted(stream[epoch * 100 : (epoch + 1) * 100]) == list(range(100))
    assert len(set(stream[300:])) == 20
    assert (stream[:100] != stream[100:200]).any()


def test_the_split_and_normalisation_are_the_authors(sets: Sets) -> None:
    training, test = sets["mnist"]
    kept, chosen = images.split()
    assert len(kept) == len(set(kept)) == 50_000
    assert (training.ids.numpy() == chosen).all()
    # Counted from the authors' program.
    per_class = [3970, 4470, 3939, 4089, 3907, 3588, 3975, 4218, 3895, 4002]
    assert np.bincount(training.labels).tolist() == per_class
    assert len(test.ids) == 10_000
    # Their scale: (0 - 33.275) / 78.518 for a black pixel, (255 - 33.275) / 78.518 for a white one.
    assert training.inputs.min().item() == pytest.approx(-33.275 / 78.518, abs=1e-4)
    assert training.inputs.max().item() == pytest.approx((255 - 33.275) / 78.518, abs=1e-4)


@pytest.mark.slow
def test_a_small_study_and_its_bounds(data_dir: Path, tmp_path: Path, sets: Sets) -> None:
    """With a bound that nothing could hold; then the same figures beside the study's own."""
    study = edited(tmp_path, "max_output_error: 1.0e-4", "max_output_error: 1.0e-12")
    done = run(study, data_dir, tmp_path, "--variant", "code")
    assert done.returncode == 1, done.stderr
    facts = json.loads((tmp_path / "report.json").read_text())
    (only,) = facts["variants"]
    assert [words.split(":")[0] for words in only["failures"]] == ["layer 0", "layer 2", "layer 4"]
    page = (tmp_path / "report.md").read_text()
    for text in (page, done.stdout):
        assert text.count("Bounds that do not hold:") == 1
        assert "Every bound of the study holds." not in text
    ask = only["answers"]["ask"]
    assert list(ask["layers"]) == ["0", "2", "4"]
    for layer in ask["layers"].values():
        assert layer["rows"] == 200 * 32
        assert 0 < layer["output_error"] <= 1e-4
    assert ask["accuracy_dual"] == ask["accuracy_layer"]
    # 200 steps learn most of MNIST; chance is 0.1.
    assert only["record"]["test_accuracy"]["mnist"] > 0.8
    assert set(only["stages"]) == {"record", "build", "verify", "ask", "votes", "serve"}
    # Keys and values in float32, and little beside them.
    rows = 200 * 32 * 4 * ((784 + 64 + 64) + (64 + 64 + 10))
    for size in only["bytes"].values():
        assert rows <= size <= 1.3 * rows + 20e6
    assert not (tmp_path / "code" / "recording").exists()
    assert not (tmp_path / "code" / "index").exists()
    check_votes(sets, tmp_path, facts)
    check_accuracy(data_dir, only)
    check_two_variants(config.load(study), tmp_path)
    # What is done is not done again, unless the study has changed.
    before = (tmp_path / "code" / "run.json").stat().st_mtime_ns
    again = run(study, data_dir, tmp_path, "--variant", "code")
    assert again.returncode == 1, again.stderr
    assert "[code] is done already" in again.stderr
    assert (tmp_path / "code" / "run.json").stat().st_mtime_ns == before


def test_what_a_stage_costs_is_what_its_process_took(tmp_path: Path) -> None:
    program = "import time; taken = bytes([1]) * (80 << 20); time.sleep(0.3)"
    usage = measure.run([sys.executable, "-IS", "-c", program], tmp_path / "log")
    assert usage.seconds >= 0.3
    for peak in (usage.peak_anonymous, usage.peak_rss):
        assert 80 << 20 <= peak <= 110 << 20


def check_two_variants(strict: config.Study, out: Path) -> None:
    """A report of two, the first of which holds the study's own bounds."""
    study = config.load(EXPERIMENTS / "mnist_tiny.yaml")
    assert report.load_run(study, "code", out / "code") is None  # of other bounds
    done = report.load_run(strict, "code", out / "code")
    assert done is not None
    done.failures = report.failures(study, done)
    assert done.failures == []
    other = replace(done, variant="paper", failures=report.failures(strict, done))
    (out / "both").mkdir()
    report.write(study, [done, other], "the command", out / "both")
    told = json.loads((out / "both" / "report.json").read_text())
    assert [each["variant"] for each in told["variants"]] == ["code", "paper"]
    page = (out / "both" / "report.md").read_text()
    assert page.count("Every bound of the study holds.") == 1
    assert page.count("Bounds that do not hold:") == 1


def check_accuracy(data: Path, only: dict[str, Any]) -> None:
    """Training that nothing records, longer than the study's, comes by the same network."""
    words = [EXPERIMENTS / "mnist_tiny.yaml", "--data", data, "--steps", 200, 250]
    done = warm.run_file(EXPERIMENTS / "accuracy.py", *words)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(lines) == 4
    share = only["record"]["test_accuracy"]["mnist"]
    assert lines["code, 200 steps"] == f"{100 * share:.2f}% on mnist"
    for variant in ("code", "paper"):
        assert lines[f"{variant}, 250 steps"] != lines[f"{variant}, 200 steps"]


def check_votes(sets: Sets, out: Path, told: dict[str, Any]) -> None:
    """Layer 0's row of Table 1 against float64 sums over the images that training saw."""
    study = config.load(EXPERIMENTS / "mnist_tiny.yaml")
    assert study.votes is not None
    training, test = sets["mnist"]
    ((seen, plan),) = images.phases(study, {"mnist": training}, seed=0)
    times = np.bincount(plan.numpy().ravel(), minlength=len(seen.ids))
    queries = test.inputs[: study.votes.images].double().numpy()
    target = test.labels[: study.votes.images].numpy()
    weights = np.abs(queries @ seen.inputs.double().numpy().T) * times
    sums = np.stack([weights[:, seen.labels.numpy() == label].sum(1) for label in range(10)], 1)
    model = images.network(study.hidden)
    model.load_state_dict(load_file(out / "code" / "model.safetensors"))
    output = model(test.inputs[: study.votes.images]).argmax(1).numpy()
    facts = told["variants"][0]["answers"]["votes"]
    expected = votes.shares(sums.argmax(1), target, output)
    assert {name: facts["layers"][0][name] for name in expected} == pytest.approx(expected)
    assert 0 < facts["wrong"] == (output != target).sum()
    table = json.loads((out / "table1.json").read_text())
    assert table["seeds"] == 1
    assert list(table["layers"]) == ["0", "1", "2"]
    for name, share in expected.items():
        assert table["layers"]["0"][name] == pytest.approx([share, 0.0])


def test_the_published_table_1_is_the_papers_within_two_deviations() -> None:
    table = json.loads((ROOT / "docs" / "results" / "table1.json").read_text())
    assert table["seeds"] == 5
    assert table["accuracy"][0] == pytest.approx(97, abs=0.5)
    assert set(table["layers"]) == set(table1.PAPER)
    for layer, cells in table1.PAPER.items():
        for column, printed in cells.items():
            assert table1.holds(table["layers"][layer][column], printed), (layer, column)


def test_a_cell_holds_within_two_deviations_only() -> None:
    assert table1.holds([20.0, 9.0], (18.0, 1.0))
    assert not table1.holds([20.1, 0.0], (18.0, 1.0))
    assert table1.holds([75.2, 0.1], (75.1, 0.0))
    assert not table1.holds([75.3, 0.1], (75.1, 0.0))


def test_table_1_has_means_and_sample_deviations() -> None:
    columns = {"no_target": 10.0, "no_output": 50.0, "yes": 75.0}
    runs = [
        {"accuracy": 97.0 + extra, "layers": [{**columns, "yes": 75.0 + extra}]}
        for extra in (0.0, 1.0, 2.0)
    ]
    table = table1.summary(runs)
    assert table["seeds"] == 3
    assert table["accuracy"] == pytest.approx([98.0, 1.0])
    assert table["layers"]["0"]["yes"] == pytest.approx([76.0, 1.0])
    assert table["layers"]["0"]["no_target"] == pytest.approx([10.0, 0.0])


def test_shares_split_on_whether_the_output_is_right() -> None:
    target = np.array([1, 2, 3, 4, 5])
    output = np.array([1, 2, 9, 9, 9])
    vote = np.array([1, 7, 3, 9, 9])
    assert votes.shares(vote, target, output) == pytest.approx(
        {"no_target": 100 / 3, "no_output": 200 / 3, "yes": 50.0}
    )


@pytest.mark.slow
def test_a_mask_brings_back_what_a_second_task_took(
    data_dir: Path, tmp_path: Path, sets: Sets
) -> None:
    words = [EXPERIMENTS / "continual_tiny.yaml", "--data", data_dir, "--out", tmp_path]
    done = warm.run_file(EXPERIMENTS / "run.py", *words)
    assert done.returncode == 0, done.stderr
    (only,) = json.loads((tmp_path / "report.json").read_text())["variants"]
    facts = only["answers"]["masks"]
    by_title = {each["title"]: each["accuracy"] for each in facts["passes"]}
    swept = {each["step"]: each["accuracy"] for each in facts["sweep"]}
    first, last = only["record"]["test_accuracy_by_phase"]
    assert last["mnist"] < first["mnist"] - 0.1
    assert facts["differ_from_model"] == 0
    assert by_title["nothing masked"] == swept[400] == facts["accuracy"]
    assert by_title["fashion masked"] == swept[200]
    # Parts that are added up are what a masked forward pass gives.
    assert by_title["fashion masked, by dual_form"] == swept[200]
    assert by_title["fashion masked from step 210 on, by dual_form"] == swept[210]
    assert swept[200]["mnist"] > swept[210]["mnist"] > swept[400]["mnist"]
    # The dual layers after the first phase are the model that training had then.
    model = trained_on_mnist_only(sets)
    _, test = sets["mnist"]
    then = (model(test.inputs[:1000]).argmax(1) == test.labels[:1000]).double().mean().item()
    assert by_title["the layers after 200 steps, by dual_form"]["mnist"] == pytest.approx(
        then, abs=1.5e-3
    )
    # What momentum still added after that phase is all that sets the masked layers apart.
    assert by_title["fashion masked"]["mnist"] == pytest.approx(then, abs=0.03)
    # The image that is shown is one that the masked rows sent wrong.
    (shown,) = json.loads((tmp_path / "code" / "figures.json").read_text())
    assert shown["place"] == facts["astray"]["example"]["place"]
    assert shown["label"] == 1 != shown["prediction"]
    for kind in ("attention", "sums", "matches", "profile", "contributions"):
        assert is_drawn(tmp_path / "code" / "figures" / f"astray_{kind}.png")
    assert is_drawn(tmp_path / "code" / "figures" / "sweep.png")
    tasks = {"mnist": 40_053, "fashion": 40_053}
    ids = [set(sets[task][0].ids.tolist()) for task in tasks]
    assert [len(each) for each in ids] == list(tasks.values())
    assert not ids[0] & ids[1]


def is_drawn(path: Path) -> bool:
    """Whether a picture is of a size to be read, and not of one colour."""
    with Image.open(path) as picture:
        width, height = picture.size
        return min(width, height) > 300 and len(picture.convert("L").getcolors()) > 10


def trained_on_mnist_only(sets: Sets) -> torch.nn.Module:
    """The model after continual_tiny's first phase, by a plain loop."""
    study = config.load(EXPERIMENTS / "continual_tiny.yaml")
    training = {task: sets[task][0] for task in study.tasks}
    torch.manual_seed(0)
    model = images.network(study.hidden)
    variant = study.variants["code"]
    optimizer = torch.optim.SGD(model.parameters(), lr=variant.lr, momentum=variant.momentum)
    seen, plan = next(images.phases(study, training, seed=0))
    for batch in plan:
        loss = torch.nn.functional.cross_entropy(model(seen.inputs[batch]), seen.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
        optimizer.step()
    return model


def run(study: Path, data: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return warm.run_file(EXPERIMENTS / "run.py", study, "--data", data, "--out", out, *more)
