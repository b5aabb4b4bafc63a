"""The paper's Table 1 from the runs of one variant, beside the paper's own numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.report import Run

COLUMNS = ("no_target", "no_output", "yes")
# Table 1 as printed: percent, mean and standard deviation over 5 runs, by layer.
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "0": {"no_target": (17.2, 2.7), "no_output": (49.5, 1.5), "yes": (75.1, 0.0)},
    "1": {"no_target": (18.0, 2.9), "no_output": (52.9, 2.9), "yes": (78.8, 0.8)},
    "2": {"no_target": (20.6, 2.6), "no_output": (60.1, 4.5), "yes": (84.7, 1.1)},
}


def write(runs: Sequence[Run], out: Path, suffix: str) -> list[str]:
    """Write table1<suffix>.json and return its Markdown.

    Layers are the paper's: 0 is the first linear layer. All numbers are in percent; standard
    deviations are the sample's.
    """
    table = summary([run.answers["votes"] for run in runs])
    (out / f"table1{suffix}.json").write_text(json.dumps(table, indent=1) + "\n")
    wrong = [run.answers["votes"]["wrong"] for run in runs]
    images = runs[0].answers["votes"]["images"]
    lines = [
        f"{len(runs)} seeds, {images:,} test images each, of which {min(wrong)} to {max(wrong)} "
        f"are classified wrongly; accuracy {_pair(table['accuracy'])} %. Percent, mean ± sample "
        "standard deviation; the last column is the distance from the paper's mean, also in the "
        "paper's standard deviations.",
        "",
        "| layer | is the output right? | vote is | paper | here | off by |",
        "|---|---|---|---:|---:|---:|",
    ]
    for layer, cells in table["layers"].items():
        for column in COLUMNS:
            right, vote = ("yes", "target") if column == "yes" else ("no", column[3:])
            printed = PAPER.get(layer, {}).get(column)
            lines.append(
                f"| {layer} | {right} | {vote} | {'' if printed is None else _pair(printed)} "
                f"| {_pair(cells[column])} | {_distance(cells[column], printed)} |"
            )
    return lines


def summary(votes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and sample standard deviations over runs, as docs/results/table1.json holds them.

    Args:
        votes: What runner/votes.py left of each run.
    """
    layers = {
        str(number): {
            column: _moments([each["layers"][number][column] for each in votes])
            for column in COLUMNS
        }
        for number in range(len(votes[0]["layers"]))
    }
    accuracy = _moments([each["accuracy"] for each in votes])
    return {"seeds": len(votes), "accuracy": accuracy, "layers": layers}


def _moments(values: Sequence[float]) -> list[float]:
    """Mean and sample standard deviation; that of a single value is 0."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [statistics.fmean(values), deviation]


def _pair(cell: Sequence[float]) -> str:
    return f"{cell[0]:.1f} ± {cell[1]:.1f}"


def _distance(cell: Sequence[float], printed: Sequence[float] | None) -> str:
    """How far a mean is from the paper's, in words."""
    if printed is None or math.isnan(cell[0]):
        return ""
    off = cell[0] - printed[0]
    within = "within two" if holds(cell, printed) else "**not within two**"
    if printed[1] == 0.0:
        return f"{off:+.2f} points; the paper's deviation is printed as 0.0, so: {within}"
    return f"{off:+.1f} points, {abs(off) / printed[1]:.1f} deviations: {within}"


def holds(cell: Sequence[float], printed: Sequence[float]) -> bool:
    """Whether a mean is within two of the paper's standard deviations.

    A deviation that is printed as 0.0 can be anything below 0.05, and the mean beside it is rounded
    to a tenth as well: there it may be off by 2 * 0.05 + 0.05.
    """
    allowed = 2 * printed[1] if printed[1] else 0.15
    return abs(cell[0] - printed[0]) <= allowed
