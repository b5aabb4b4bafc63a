"""Time travel against ordinary checkpoints: dual outputs at a step beside the layers of that step.

    python experiments/mnist_checkpoints.py --data DIR --out DIR

A plain training script, without the recorder, saves checkpoints; a recorded run of the same seed is
built into an index; every layer's dual output at these steps is compared with the checkpoint's own
layer on all test images, and a forward pass in dual form with the model's predictions. The exit
status is 1 where a bound does not hold, 2 where a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from runner import config, measure
from runner.server import DUALFORM

HERE = Path(__file__).resolve().parent
DEFAULT = HERE / "mnist_checkpoints.yaml"


@dataclass(frozen=True)
class Checkpoints:
    """What mnist_checkpoints.yaml says.

    Attributes:
        study: The study that is trained, a YAML file beside this one.
        variant: Its optimizer settings.
        checkpoints: Numbers of steps done; the last one is the study's.
        max_output_error: Bound on the largest |dual - layer| / |layer| over all test images.
    """

    study: Path
    variant: str
    checkpoints: tuple[int, ...]
    max_output_error: float


def main() -> int:
    arguments = _arguments()
    try:
        plan = load(arguments.plan)
        arguments.out.mkdir(parents=True, exist_ok=True)
        facts = _run(plan, arguments)
    except (config.ConfigError, measure.StageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failures = _failures(plan, facts)
    page = _page(plan, facts, failures, arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    report = {"max_output_error": plan.max_output_error, **facts, "failures": failures}
    name = arguments.plan.stem
    (arguments.results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.results / f"{name}.md").write_text(page)
    print(page)
    return 1 if failures else 0


def load(path: Path) -> Checkpoints:
    """Read the plan.

    Raises:
        runner.config.ConfigError: Not readable, not YAML, a wrong key or value.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise config.ConfigError(f"{path}: {error}") from None
    keys = {"study": str, "variant": str, "checkpoints": list, "max_output_error": float}
    if not isinstance(data, dict) or set(data) != set(keys):
        raise config.ConfigError(f"{path} must have the keys {', '.join(keys)}, and no others")
    for key, kind in keys.items():
        if type(data[key]) is not kind:
            raise config.ConfigError(f"{path}: {key} must be of type {kind.__name__}")
    plan = Checkpoints(
        path.parent / data["study"],
        data["variant"],
        tuple(data["checkpoints"]),
        data["max_output_error"],
    )
    study = config.load(plan.study)
    if plan.variant not in study.variants:
        raise config.ConfigError(f"{path}: variant is one of {', '.join(study.variants)}")
    steps = plan.checkpoints
    if any(type(step) is not int or not 0 <= step <= study.steps for step in steps) or (
        not steps or steps[-1] != study.steps
    ):
        raise config.ConfigError(
            f"{path}: checkpoints are integers from 0 to the study's {study.steps} steps, "
            f"the last one {study.steps}"
        )
    return plan


def _run(plan: Checkpoints, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every stage as a process of its own; what the comparison found."""
    out, scratch = arguments.out, arguments.out / "data"
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    python = [sys.executable, "-m"]
    seconds: dict[str, float] = {}

    def stage(title: str, command: list[str | Path]) -> None:
        print(f"{title} …", file=sys.stderr, flush=True)
        seconds[title] = measure.run(command, out / f"{title}.log", env).seconds
        print(f"{title}: {seconds[title]:.1f} s", file=sys.stderr, flush=True)

    steps = [str(step) for step in plan.checkpoints]
    training: list[str | Path] = [plan.study, plan.variant, arguments.data, scratch]
    stage("plain", [*python, "runner.plain", *training, out, *steps])
    recorded: Path = arguments.recorded or out / "recorded"
    if arguments.recorded is None:
        if recorded.exists():
            shutil.rmtree(recorded)
        recorded.mkdir()
        stage("record", [*python, "runner.record", *training, recorded])
        stage("build", [DUALFORM, "index", "build", recorded / "recording", recorded / "index"])
    compared = [plan.study, arguments.data, scratch, recorded / "index"]
    model = recorded / "model.safetensors"
    stage("compare", [*python, "runner.compare", *compared, model, out, *steps])
    if arguments.recorded is None and not arguments.keep:
        shutil.rmtree(recorded)
    return {**json.loads((out / "compare.json").read_text()), "seconds": seconds}


def _failures(plan: Checkpoints, facts: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    found = [
        f"layer {entry['layer']} after {entry['step']:,} steps: {entry['error']:.1e}"
        for entry in facts["errors"]
        if not entry["error"] <= plan.max_output_error
    ]
    if not facts["same_bits"]:
        found.append("the recorded run's weights are not those of the plain run, bit for bit")
    if facts["predictions_equal"] != facts["images"]:
        found.append(
            f"{facts['images'] - facts['predictions_equal']:,} predictions differ in dual form"
        )
    return found


def _page(
    plan: Checkpoints, facts: dict[str, Any], failures: list[str], arguments: argparse.Namespace
) -> str:
    study = config.load(plan.study)
    layers = list(dict.fromkeys(entry["layer"] for entry in facts["errors"]))
    error = {(entry["step"], entry["layer"]): entry for entry in facts["errors"]}
    variant = study.variants[plan.variant]
    default = arguments.plan.resolve() == DEFAULT
    plan_argument = "" if default else f" {arguments.plan.name}"
    lines = [
        f"# {arguments.plan.stem}",
        "",
        f"784-{'-'.join(map(str, study.hidden))}-10 on MNIST, {study.steps:,} steps of batch "
        f"{study.batch_size}, lr {variant.lr:g}, momentum {variant.momentum:g}, clip "
        f"{variant.clip:g}. Made by:",
        "",
        f"    python experiments/mnist_checkpoints.py{plan_argument} --data DIR --out DIR",
        "",
        f"Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}; "
        + ", ".join(f"{name} {taken:.0f} s" for name, taken in facts["seconds"].items())
        + ".",
        "",
        "Checkpoints come from a training script that knows nothing of dualform. Its weights after "
        f"{study.steps:,} steps are {'' if facts['same_bits'] else 'NOT '}those of the recorded "
        "run, bit for bit.",
        "",
        "Dual output after so many steps against the checkpoint's own layer, whose inputs are the "
        "checkpoint's own activations: the largest |dual - layer| / |layer| over "
        f"{facts['images']:,} test images; bound {plan.max_output_error:g}.",
        "",
        "| steps | rows | " + " | ".join(f"layer {name}" for name in layers) + " |",
        "|---:|---:|" + "---:|" * len(layers),
    ]
    for step in plan.checkpoints:
        row = [f"{error[step, name]['error']:.1e}" for name in layers]
        lines.append(f"| {step:,} | {error[step, layers[0]]['rows']:,} | {' | '.join(row)} |")
    lines += [
        "",
        f"The whole network in dual form predicts as the network does on "
        f"{facts['predictions_equal']:,} of {facts['images']:,} test images (accuracy "
        f"{facts['accuracy_dual']:.2%} and {facts['accuracy']:.2%}). The largest difference of a "
        f"logit is {facts['largest_logit_difference']:.1e}; the closest decision is one by "
        f"{facts['smallest_margin']:.1e}.",
        "",
        "**Does not hold:** " + "; ".join(failures) + "." if failures else "Every bound holds.",
    ]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path, nargs="?", default=DEFAULT, help="a YAML file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST/")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument(
        "--recorded",
        type=Path,
        help="take index/ and model.safetensors from this folder, as experiments/run.py --keep "
        "leaves one per variant, instead of recording again",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=HERE.parent / "docs" / "results",
        help="folder for the report (default: docs/results)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the recording and the index (about 20 GB)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
