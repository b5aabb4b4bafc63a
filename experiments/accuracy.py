"""Test accuracy of an image study's network after so many steps of training, nothing recorded.

    python experiments/accuracy.py experiments/joint.yaml --data DIR --steps 5000 6000 7500 10000

One line per variant and number of steps; more steps than the study has lengthen its last phase.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from runner import config, images
from runner.plain import training


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the data sets")
    parser.add_argument("--steps", type=int, nargs="+", help="default: the study's")
    parser.add_argument("--seed", type=int, help="default: the study's first")
    arguments = parser.parse_args()
    try:
        study = config.load(arguments.study)
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = arguments.steps or [study.steps]
    longer = max(wanted) - study.steps
    if longer > 0:
        *before, last = study.phases
        study = replace(study, phases=(*before, replace(last, steps=last.steps + longer)))
    seed = study.seeds[0] if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory() as scratch:
        sets = {task: images.load(arguments.data, Path(scratch), task) for task in study.tasks}
        learned = {task: both[0] for task, both in sets.items()}
        for name, variant in study.variants.items():
            for done, model in training(study, variant, seed, learned):
                if done in wanted:
                    shares = (
                        f"{100 * images.accuracy(model, test):.2f}% on {task}"
                        for task, (_, test) in sets.items()
                    )
                    print(f"{name}, {done:,} steps: {', '.join(shares)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
