"""The studies: their YAML, the authors' split of MNIST, and a small one run from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

from runner import config, mnist  # noqa: E402


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
    assert study.variants["paper"] == config.Variant(0.03, 0.0, 1.0, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 0", "seed: 0\nsede: 1", "unknown key 'sede'"),
        ("seed: 0", "", "no key 'seed'"),
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


def test_a_wrong_study_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    study = edited(tmp_path, "steps: 200", "steps: many")
    done = run(study, tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_batches_cross_epoch_borders_and_repeat_nothing_within_an_epoch() -> None:
    plan = mnist.batches(n=100, size=32, steps=10, seed=0)
    assert plan.shape == (10, 32)
    stream = plan.ravel()
    for epoch in range(3):
        assert sorted(stream[epoch * 100 : (epoch + 1) * 100]) == list(range(100))
    assert len(set(stream[300:])) == 20
    assert (stream[:100] != stream[100:200]).any()


def test_the_split_and_normalisation_are_the_authors(data_dir: Path, tmp_path: Path) -> None:
    training, test = mnist.load(data_dir, tmp_path)
    kept, chosen = mnist.split()
    assert len(kept) == len(set(kept)) == 50_000
    assert (training.ids.numpy() == chosen).all()
    # Counted from the authors' program.
    per_class = [3970, 4470, 3939, 4089, 3907, 3588, 3975, 4218, 3895, 4002]
    assert np.bincount(training.labels).tolist() == per_class
    assert len(test.ids) == 10_000
    # Their scale: (0 - 33.275) / 78.518 for a black pixel, (255 - 33.275) / 78.518 for a white one.
    assert training.inputs.min().item() == pytest.approx(-33.275 / 78.518, abs=1e-4)
    assert training.inputs.max().item() == pytest.approx((255 - 33.275) / 78.518, abs=1e-4)


def test_a_small_study_holds_its_bounds(data_dir: Path, tmp_path: Path) -> None:
    done = run(EXPERIMENTS / "mnist_tiny.yaml", data_dir, tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["variant"] for each in report["variants"]] == ["code", "paper"]
    for each in report["variants"]:
        bound = report["study"]["variants"][each["variant"]]["max_output_error"]
        assert list(each["ask"]["layers"]) == ["0", "2", "4"]
        for layer in each["ask"]["layers"].values():
            assert layer["rows"] == 200 * 128
            assert 0 < layer["output_error"] <= bound
        assert each["ask"]["accuracy_dual"] == each["ask"]["accuracy_layer"]
        # 200 steps learn most of MNIST; chance is 0.1.
        assert each["record"]["test_accuracy"] > 0.8
        assert set(each["stages"]) == {"record", "build", "verify", "ask", "serve"}
        assert all(usage["peak_anonymous"] > 10e6 for usage in each["stages"].values())
        # Keys and values in float32, and little beside them.
        rows = 200 * 128 * 4 * ((784 + 64 + 64) + (64 + 64 + 10))
        for size in each["bytes"].values():
            assert rows <= size <= 1.3 * rows + 20e6
        folder = tmp_path / each["variant"]
        assert not (folder / "recording").exists()
        assert not (folder / "index").exists()
    page = (tmp_path / "report.md").read_text()
    assert page.count("Every bound of the study holds.") == 2


def test_a_bound_that_does_not_hold_is_said(data_dir: Path, tmp_path: Path) -> None:
    strict = edited(tmp_path, "max_output_error: 1.0e-4", "max_output_error: 1.0e-12")
    done = run(strict, data_dir, tmp_path / "out", "--variant", "code")
    assert done.returncode == 1, done.stderr
    (only,) = json.loads((tmp_path / "out" / "report.json").read_text())["variants"]
    assert [words.split(":")[0] for words in only["failures"]] == ["layer 0", "layer 2", "layer 4"]
    assert "Bounds that do not hold:" in done.stdout


def run(study: Path, data: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, EXPERIMENTS / "run.py", study, "--data", data, "--out", out, *more]
    # One thread: the network is small, and cores may be few and busy.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, env=env)
