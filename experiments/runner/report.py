"""The study's report: facts as JSON, and a Markdown page with the command that makes it again."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runner.config import Study
from runner.measure import Usage


@dataclass
class VariantReport:
    """What one variant came to.

    Attributes:
        stages: Cost of each stage's process, by the stage's name.
        bytes: Size on disk of "recording" and "index".
        record: Facts of the training process (runner/record.py).
        verify: What `dualform index verify --json` printed.
        open_seconds: From starting the server until it listened.
        ask: Facts of the questions (runner/ask.py).
        failures: Bounds of the study that did not hold; empty where all did.
    """

    variant: str
    stages: dict[str, Usage] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    open_seconds: float = 0.0
    ask: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def write(study: Study, reports: list[VariantReport], command: str, out: Path) -> None:
    """Write report.json and report.md to `out`."""
    facts = {
        "study": asdict(study),
        "command": command,
        "machine": _machine(),
        "variants": [asdict(report) for report in reports],
    }
    (out / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [
        f"# {study.name}",
        "",
        f"784-{'-'.join(map(str, study.hidden))}-10 on MNIST, {study.steps:,} steps of batch "
        f"{study.batch_size}: {study.rows:,} rows per layer. Made by:",
        "",
        f"    {command}",
        "",
        ", ".join(f"{key} {value}" for key, value in _machine().items()) + ".",
    ]
    for report in reports:
        lines += ["", *_variant(study, report)]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _variant(study: Study, report: VariantReport) -> list[str]:
    variant = study.variants[report.variant]
    ask, record = report.ask, report.record
    lines = [
        f"## {report.variant}: SGD, lr {variant.lr:g}, momentum {variant.momentum:g}, "
        f"clip {variant.clip:g}",
        "",
        "| stage | seconds | peak anonymous + shared MB | peak resident MB, mapped files too |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {usage.seconds:.1f} | {usage.peak_anonymous / 1e6:.0f} "
        f"| {usage.peak_rss / 1e6:.0f} |"
        for name, usage in report.stages.items()
    ]
    lines += [
        "",
        f"Of the first stage the training loop took {record['loop_seconds']:.1f} s and closing "
        f"the recording {record['close_seconds']:.1f} s. On disk: recording "
        f"{report.bytes['recording'] / 1e9:.2f} GB, index {report.bytes['index'] / 1e9:.2f} GB. "
        f"The server listened after {report.open_seconds:.1f} s. "
        f"Test accuracy {record['test_accuracy']:.2%}; over the {ask['images']:,} images asked "
        f"{ask['accuracy_layer']:.2%}, with the last layer in dual form "
        f"{ask['accuracy_dual']:.2%}.",
        "",
        "Weight error: what `dualform index verify` found, |rebuilt - trained| / |trained - "
        f"initial| in the Frobenius norm, bound {variant.max_weight_error:g}. Output error: "
        f"|dual - layer| / |layer|, the largest and the median over {ask['images']:,} test images, "
        f"bound {variant.max_output_error:g}. Seconds for the outputs of these images, for top-k "
        f"(largest absolute weight) and absolute sums per label of {study.ask.top_k_queries} "
        f"queries, k = {study.ask.k}. Server MB: anonymous and shared at their peak during top-k, "
        f"bound {study.ask.max_server_mb} throughout.",
        "",
        "| layer | rows | weight error | output error | median | outputs s | top-k s | sums s "
        "| server MB | vote is label |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {facts['rows']:,} | {_weight_error(report, name)} "
        f"| {facts['output_error']:.1e} | {facts['output_error_median']:.1e} "
        f"| {facts['output_seconds']:.2f} | {facts['top_k_seconds']:.2f} "
        f"| {facts['sums_seconds']:.2f} | {facts['top_k_server_anonymous'] / 1e6:.0f} "
        f"| {facts['vote_is_label']:.0%} |"
        for name, facts in ask["layers"].items()
    ]
    if report.failures:
        return [*lines, "", "**Bounds that do not hold:** " + "; ".join(report.failures) + "."]
    return [*lines, "", "Every bound of the study holds."]


def _weight_error(report: VariantReport, layer: str) -> str:
    for own in report.verify["layers"]:
        if own["layer"] == layer and own["weight_error"] is not None:
            return f"{own['weight_error']:.1e}"
    return "not rebuilt"


def _machine() -> dict[str, str]:
    names = ("torch", "faiss-cpu", "numpy", "grpcio")
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in names},
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
    }
