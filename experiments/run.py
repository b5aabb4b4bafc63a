"""Run a study: train and record, build, verify, serve, ask; leave a report with what it cost.

    python experiments/run.py experiments/mnist_single.yaml --data DIR --out DIR

Every stage is a process of its own, so that its memory is its own. Runs that are done already are
taken from --out as they are, so an interrupted study goes on where it stopped. The exit status is
1 where a bound of the study does not hold, 2 where a stage failed.
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
from typing import Any

from runner import config, measure, report
from runner.server import DUALFORM, serving

HERE = Path(__file__).resolve().parent


def main() -> int:
    arguments = _arguments()
    try:
        study = config.load(arguments.study)
        names = _chosen("variant", arguments.variant, list(study.variants), arguments.study)
        seeds = _chosen("seed", arguments.seed, list(study.seeds), arguments.study)
        arguments.out.mkdir(parents=True, exist_ok=True)
        runs: list[report.Run] = []
        for name in names:
            for seed in seeds:
                runs.append(_run(study, name, seed, arguments))
                report.write(study, runs, "python " + shlex.join(sys.argv), arguments.out)
    except (config.ConfigError, measure.StageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((arguments.out / "report.md").read_text())
    return 1 if any(each.failures for each in runs) else 0


def _run(study: config.Study, name: str, seed: int, arguments: argparse.Namespace) -> report.Run:
    """One variant with one seed, from training to answers."""
    title = name if len(study.seeds) == 1 else f"{name}-{seed}"
    folder = arguments.out / title
    done = report.load_run(study, name, folder)
    if done is not None:
        print(f"[{title}] is done already: {folder}", file=sys.stderr, flush=True)
        return done
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    recording, index, scratch = folder / "recording", folder / "index", arguments.out / "data"
    result = report.Run(name, seed)
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}

    def stage(
        title_of_stage: str,
        command: list[str | Path],
        output: Path | None = None,
        allowed: tuple[int, ...] = (0,),
    ) -> None:
        print(f"[{title}] {title_of_stage} …", file=sys.stderr, flush=True)
        usage = measure.run(command, folder / f"{title_of_stage}.log", env, output, allowed)
        result.stages[title_of_stage] = usage
        print(f"[{title}] {title_of_stage}: {usage.seconds:.1f} s", file=sys.stderr, flush=True)

    def python(module: str, *words: str | Path) -> list[str | Path]:
        return [sys.executable, "-m", f"runner.{module}", arguments.study, *words]

    stage("record", python("record", name, str(seed), arguments.data, scratch, folder))
    result.record = json.loads((folder / "record.json").read_text())
    result.bytes["recording"] = measure.folder_bytes(recording)
    stage("build", [DUALFORM, "index", "build", recording, index])
    result.bytes["index"] = measure.folder_bytes(index)
    if not arguments.keep:
        shutil.rmtree(recording)
    if study.verify:
        verify: list[str | Path] = [DUALFORM, "index", "verify", index, "--json"]
        stage("verify", verify, folder / "verify.json", allowed=(0, 1))
        result.verify = json.loads((folder / "verify.json").read_text())

    start = time.perf_counter()
    limits = _server_file(study, folder)
    with serving(index, folder / "serve.log", limits) as (address, pid):
        result.open_seconds = time.perf_counter() - start
        with measure.Sampler(pid) as sampler:
            for questions in ("ask", "votes", "masks", "figures"):
                if getattr(study, questions) is None:
                    continue
                pids = [str(pid)] if questions == "ask" else []
                stage(questions, python(questions, arguments.data, scratch, folder, address, *pids))
                result.answers[questions] = json.loads((folder / f"{questions}.json").read_text())
        result.stages["serve"] = sampler.usage()
    result.failures = report.failures(study, result)
    if not arguments.keep:
        shutil.rmtree(index)
    report.save_run(study, result, folder)
    return result


def _server_file(study: config.Study, folder: Path) -> Path | None:
    """Limits that let a masked pass ask for all its images at once; None where there is none."""
    if study.masks is None:
        return None
    path = folder / "server.yaml"
    path.write_text(f"limits: {{max_queries: {2 * study.masks.images}, max_message_mib: 1024}}\n")
    return path


def _chosen(key: str, asked: list[str] | None, known: list[Any], study: Path) -> list[Any]:
    by_name = {str(each): each for each in known}
    for name in asked or ():
        if name not in by_name:
            raise config.ConfigError(
                f"no {key} {name!r} in {study}; there are {', '.join(by_name)}"
            )
    return [by_name[name] for name in asked or by_name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="the study's YAML file")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds MNIST/ and FashionMNIST/"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the report and logs")
    parser.add_argument(
        "--variant", action="append", help="only this variant (may be repeated; default: all)"
    )
    parser.add_argument(
        "--seed", action="append", help="only this seed (may be repeated; default: all)"
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the recording and the index (about 20 GB per run at the paper's size)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
