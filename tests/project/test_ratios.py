"""The benchmarks' key ratios: how a measurement is read, what is said of it. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ratios

RECORDER, TUNED = "recorder: cpu time to that without", "rate to FAISS tuned"
TOP_K = f"top-k: layer 0, 64 queries, k = 10, {TUNED}"


def results(folder: Path, *, overhead: float, tuned: float) -> Path:
    """What `recorder` and `topk` write; `answers` was not run."""
    (folder / "recorder.json").write_text(json.dumps({"cpu_ratio": overhead, "wall_ratio": 1.2}))
    ms = {"faiss default": 90.0, "faiss tuned": tuned, "dualform auto": 10.0}
    row = {"memory": "layer 0", "n": 64, "k": 10, "ms": ms}
    (folder / "topk.json").write_text(json.dumps([row]))
    return folder


@pytest.mark.parametrize(
    ("overhead", "tuned", "of_recorder", "of_top_k"),
    [
        (1.10, 20.0, "within noise", "within noise"),
        (1.05, 30.0, "better", "better"),
        (1.15, 10.0, "worse", "worse"),
        (1.12, 24.0, "within noise", "within noise"),
    ],
)
def test_what_is_said_of_a_measurement(
    tmp_path: Path, overhead: float, tuned: float, of_recorder: str, of_top_k: str
) -> None:
    now = ratios.measured(results(tmp_path, overhead=overhead, tuned=tuned))
    assert now[RECORDER] == overhead
    assert now[TOP_K] == tuned / 10
    assert ratios.Ratio(RECORDER, 1.10, 0.02, "lower").verdict(now[RECORDER]) == of_recorder
    assert ratios.Ratio(TOP_K, 2.0, 0.25, "higher").verdict(now[TOP_K]) == of_top_k


def test_a_ratio_without_a_measurement_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results(tmp_path, overhead=9.0, tuned=0.1)
    monkeypatch.setattr("sys.argv", ["ratios", str(tmp_path), "--size", "full"])
    ratios.main()
    said = capsys.readouterr().out.splitlines()
    (line,) = (line for line in said if line.startswith(RECORDER))
    assert line.split()[-2:] == ["9.00", "worse"]
    (line,) = (line for line in said if line.startswith("absolute sums: layer 4"))
    assert line.endswith("not measured")


@pytest.mark.parametrize("size", ["small", "full"])
def test_the_kept_ratios_say_how_they_were_made(size: str) -> None:
    kept = json.loads(ratios.KEPT.read_text())[size]
    assert len(kept["made"]) > 20
    for ratio in ratios.kept(size):
        assert ratio.value > 0
        assert 0 < ratio.noise < 1
        assert ratio.better in ("higher", "lower")


def test_make_bench_measures_every_small_ratio_and_compares_them() -> None:
    text = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    for name in ("recorder", "topk", "answers"):
        assert f"--json build/bench/{name}.json" in text
    assert "benchmarks ratios build/bench" in text
    assert {ratio.name.split(":")[0] for ratio in ratios.kept("small")} == {
        "recorder",
        "top-k",
        "absolute sums",
    }
