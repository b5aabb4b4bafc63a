"""What retraining says of attribution: the linear datamodelling score, and training without the
examples that each way names first, dualform beside its peers.

    python experiments/retraining.py --data DIR --out DIR [--model mlp|vit] [--runs 5]

DIR/MNIST/raw holds the .gz files. 2,000 digits train an MLP 784-128-64-10 (SGD with momentum) or a
small vision transformer (AdamW). Each way of attribution is asked, in a process of its own and for
each of several trained models, what every training image did to the margin of each test image.
Then the network is trained again:

- on random halves of the images: the linear datamodelling score is the rank correlation, over the
  halves, of a test image's margin with the sum of the scores of those in the half, averaged over
  test images (Park et al., TRAK, ICML 2023, section 2);
- for some test images without the 100 that a way names first: how far their margin falls.

A way whose package is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attribution_ways as ways
import numpy as np
import torch
from attribution_ways import Study

REMOVED = 100


def main() -> int:
    """Train, ask, train again, and write the table."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=("mlp", "vit"), default="mlp")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--tests", type=int, default=200)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each subset")
    parser.add_argument("--runs", type=int, default=5, help="trained models that are asked")
    parser.add_argument("--removals", type=int, default=20, help="tests that lose their first 100")
    parser.add_argument("--ways", nargs="*", default=list(ways.WAYS), choices=list(ways.WAYS))
    parser.add_argument("--ask", nargs=2, metavar=("WAY", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    study = Study(arguments.data, arguments.model, arguments.examples, arguments.tests)
    folder = arguments.out / arguments.model
    if arguments.ask:
        name, run = arguments.ask
        return ask(study, name, folder / f"run-{run}")
    folder.mkdir(parents=True, exist_ok=True)
    costs = asked(study, folder, arguments)
    halves, margins = half_trained(study, folder, arguments.subsets, arguments.seeds)
    table: list[dict[str, Any]] = []
    whole = study.retrained(np.arange(study.examples), 3 * arguments.seeds)
    for name in arguments.ways:
        if name not in costs:
            continue
        scores = [np.load(folder / f"run-{run}" / f"{name}.npy") for run in range(arguments.runs)]
        single = [datamodelling(one, halves, margins) for one in scores]
        mean = sum(one / np.abs(one).mean() for one in scores) / len(scores)
        table.append(
            {
                "way": ways.WAYS[name].title,
                "score": float(np.mean(single)),
                "lowest": min(single),
                "highest": max(single),
                "of the mean": datamodelling(mean, halves, margins),
                "fall": removed(study, scores[0][: arguments.removals], whole, arguments.seeds),
                **costs[name],
            }
        )
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    chance = np.random.default_rng(0).standard_normal(scores[0].shape)
    fall = removed(study, chance[: arguments.removals], whole, arguments.seeds)
    table.append({"way": "at random", "fall": fall})
    (folder / "retraining.json").write_text(json.dumps(table, indent=1) + "\n")
    report(table, arguments.runs)
    return 0


def asked(study: Study, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Scores of every way and run, each in a process of its own; its median costs."""
    costs: dict[str, dict[str, float]] = {}
    for run in range(arguments.runs):
        at = folder / f"run-{run}"
        if not (at / "trained.json").exists():
            shutil.rmtree(at, ignore_errors=True)
            study.train_recorded(at, seed=run)
        for name in arguments.ways:
            if (at / f"{name}.json").exists():
                continue
            command = [sys.executable, __file__, "--data", str(arguments.data)]
            command += ["--out", str(arguments.out), "--model", study.kind]
            command += ["--examples", str(study.examples), "--tests", str(len(study.tests))]
            done = subprocess.run([*command, "--ask", name, str(run)], check=False)
            if done.returncode == MISSING:
                print(f"{ways.WAYS[name].title}: its package is not installed", file=sys.stderr)
            elif done.returncode:
                raise SystemExit(f"{name} of run {run} ended with {done.returncode}")
    for name in arguments.ways:
        found = [folder / f"run-{run}" / f"{name}.json" for run in range(arguments.runs)]
        if all(path.exists() for path in found):
            each = [json.loads(path.read_text()) for path in found]
            costs[name] = {key: float(np.median([one[key] for one in each])) for key in each[0]}
    return costs


MISSING = 3
"""The exit status of a process whose way needs a package that is not there."""


def ask(study: Study, name: str, run: Path) -> int:
    """One way about one trained model: its scores, and what they cost beyond those packages."""
    way = ways.WAYS[name]
    try:
        way.ready()
    except ImportError:
        return MISSING
    memory, start = peak_mb(), time.process_time()
    scores, disk = way.ask(study, run)
    seconds = time.process_time() - start
    assert scores.shape == (len(study.tests), study.examples), scores.shape
    np.save(run / f"{name}.npy", scores)
    cost = {"seconds": seconds, "memory MB": peak_mb() - memory, "disk MB": disk / 1e6}
    (run / f"{name}.json").write_text(json.dumps(cost))
    return 0


def peak_mb() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def half_trained(
    study: Study, folder: Path, subsets: int, seeds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Halves, bool [subsets, examples], and the margins of those trained on them, the mean over
    some seeds, float64 [subsets, tests]."""
    path = folder / f"halves-{subsets}-{seeds}.npz"
    if path.exists():
        kept = np.load(path)
        return kept["halves"], kept["margins"]
    drawn = np.random.default_rng(7)
    halves = np.zeros((subsets, study.examples), bool)
    for half in halves:
        half[drawn.choice(study.examples, study.examples // 2, replace=False)] = True
    margins = np.stack([study.retrained(np.flatnonzero(half), seeds) for half in halves])
    np.savez(path, halves=halves, margins=margins)
    return halves, margins


def datamodelling(scores: np.ndarray, halves: np.ndarray, margins: np.ndarray) -> float:
    """The linear datamodelling score, the mean over test images of a Spearman correlation.

    Args:
        scores: Float64 [tests, examples].
        halves: Bool [subsets, examples].
        margins: Float64 [subsets, tests].
    """
    predicted = ranks(halves @ scores.T)
    true = ranks(margins)
    each = [np.corrcoef(predicted[:, one], true[:, one])[0, 1] for one in range(true.shape[1])]
    return float(np.mean(each))


def ranks(numbers: np.ndarray) -> np.ndarray:
    """The rank of each number in its column."""
    return numbers.argsort(axis=0, kind="stable").argsort(axis=0)


def removed(study: Study, scores: np.ndarray, whole: np.ndarray, seeds: int) -> float:
    """How far margins fall, on average, when the first hundred examples of each are left out.

    Args:
        study: What is trained.
        scores: Float64 [some of the tests, examples].
        whole: Float64 [tests], the margins of those trained on all.
        seeds: Trainings of each.
    """
    falls = []
    for test, each in enumerate(scores):
        first = np.argsort(-each, kind="stable")[:REMOVED]
        left = np.setdiff1d(np.arange(study.examples), first)
        falls.append(whole[test] - study.retrained(left, seeds)[test])
    return float(np.mean(falls))


def report(table: list[dict[str, Any]], runs: int) -> None:
    """The table, in Markdown."""
    print(f"| way | score | of the mean of {runs} | fall | CPU s | memory MB | disk MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in table:
        if "score" not in row:
            print(f"| {row['way']} | | | {row['fall']:.2f} | | | |")
            continue
        spread = f"{row['score']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        print(
            f"| {row['way']} | {spread} | {row['of the mean']:.3f} | {row['fall']:.2f} "
            f"| {row['seconds']:.1f} | {row['memory MB']:,.0f} | {row['disk MB']:,.1f} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
