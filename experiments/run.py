"""Run a study: train and record, build, verify, serve, ask; leave a report with what it cost.

    python experiments/run.py experiments/mnist_single.yaml --data DIR --out DIR

Every stage is a process of its own, so that its memory is its own. The exit status is 1 where a
bound of the study does not hold, 2 where a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from runner import config, measure, report
from runner.server import DUALFORM, serving

HERE = Path(__file__).resolve().parent


def main() -> int:
    arguments = _arguments()
    try:
        study = config.load(arguments.study)
        names = arguments.variant or list(study.variants)
        unknown = [name for name in names if name not in study.variants]
        if unknown:
            raise config.ConfigError(
                f"no variant {unknown[0]!r} in {arguments.study}; "
                f"there are {', '.join(study.variants)}"
            )
        arguments.out.mkdir(parents=True, exist_ok=True)
        reports = []
        for name in names:
            reports.append(_variant(study, name, arguments))
            report.write(study, reports, "python " + shlex.join(sys.argv), arguments.out)
    except (config.ConfigError, measure.StageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((arguments.out / "report.md").read_text())
    return 1 if any(each.failures for each in reports) else 0


def _variant(study: config.Study, name: str, arguments: argparse.Namespace) -> report.VariantReport:
    folder = arguments.out / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    recording, index, scratch = folder / "recording", folder / "index", arguments.out / "data"
    result = report.VariantReport(name)
    env = {**os.environ, "PYTHONPATH": str(HERE)}

    def stage(
        title: str,
        command: list[str | Path],
        output: Path | None = None,
        allowed: tuple[int, ...] = (0,),
    ) -> None:
        print(f"[{name}] {title} …", file=sys.stderr, flush=True)
        usage = measure.run(command, folder / f"{title}.log", env, output, allowed)
        result.stages[title] = usage
        print(f"[{name}] {title}: {usage.seconds:.1f} s", file=sys.stderr, flush=True)

    python = [sys.executable, "-m"]
    stage(
        "record",
        [*python, "runner.record", arguments.study, name, arguments.data, scratch, folder],
    )
    result.record = json.loads((folder / "record.json").read_text())
    result.bytes["recording"] = measure.folder_bytes(recording)
    stage("build", [DUALFORM, "index", "build", recording, index])
    result.bytes["index"] = measure.folder_bytes(index)
    verify: list[str | Path] = [DUALFORM, "index", "verify", index, "--json"]
    stage("verify", verify, folder / "verify.json", allowed=(0, 1))
    result.verify = json.loads((folder / "verify.json").read_text())

    start = time.perf_counter()
    with serving(index, folder / "serve.log") as (address, pid):
        result.open_seconds = time.perf_counter() - start
        with measure.Sampler(pid) as sampler:
            stage(
                "ask",
                [
                    *(*python, "runner.ask", arguments.study, arguments.data, scratch, folder),
                    *(address, str(pid)),
                ],
            )
        result.stages["serve"] = sampler.usage()
    result.ask = json.loads((folder / "ask.json").read_text())
    result.failures = _failures(study, name, result)
    if not arguments.keep:
        shutil.rmtree(recording)
        shutil.rmtree(index)
    return result


def _failures(study: config.Study, name: str, result: report.VariantReport) -> list[str]:
    """The bounds that do not hold, in words."""
    variant = study.variants[name]
    found = []
    server = result.stages["serve"].peak_anonymous / 1e6
    if server > study.ask.max_server_mb:
        found.append(f"the server's memory reached {server:.0f} MB")
    for own in result.verify["layers"]:
        error = own["weight_error"]
        if error is None or error > variant.max_weight_error:
            found.append(f"layer {own['layer']}: weight error {error}; {own['note']}")
    for layer, facts in result.ask["layers"].items():
        if facts["rows"] != study.rows:
            found.append(f"layer {layer} has {facts['rows']:,} rows, not {study.rows:,}")
        if not facts["output_error"] <= variant.max_output_error:
            found.append(f"layer {layer}: output error {facts['output_error']:.1e}")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="the study's YAML file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report and logs")
    parser.add_argument(
        "--variant", action="append", help="only this variant (may be repeated; default: all)"
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the recording and the index (about 20 GB for mnist_single)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
