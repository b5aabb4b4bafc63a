"""Compare what benchmarks measured with the key ratios that are kept in ratios.json.

    python -m benchmarks ratios FOLDER [--size small]

FOLDER holds what `recorder`, `topk` and `answers` wrote with --json: recorder.json, topk.json and
answers.json; the ratios of one that is missing are "not measured". Each ratio is of two times in
one process and so depends little on the machine; a line says whether it is better, worse or within
noise. The status is 0 whatever the lines say: no test rests on timings.

ratios.json has two sizes: "small" is `make bench`, "full" the commands in docs/benchmarks.md. Each
has a line on how its values were made, the values, and the noise: how far, relative to the value,
runs at other times were off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

KEPT = Path(__file__).with_name("ratios.json")
Verdict = Literal["better", "worse", "within noise", "not measured"]


@dataclass(frozen=True)
class Ratio:
    """One kept ratio: its value, the relative noise, and which direction is better."""

    name: str
    value: float
    noise: float
    better: Literal["higher", "lower"]

    def verdict(self, now: float | None) -> Verdict:
        """What a new measurement says; None is none."""
        if now is None:
            return "not measured"
        if abs(now - self.value) <= self.noise * self.value:
            return "within noise"
        return "better" if (now > self.value) == (self.better == "higher") else "worse"


def kept(size: str, path: Path = KEPT) -> list[Ratio]:
    """The ratios of one size, as ratios.json lists them."""
    return [
        Ratio(name, **facts) for name, facts in json.loads(path.read_text())[size]["ratios"].items()
    ]


def measured(folder: Path) -> dict[str, float]:
    """Every ratio that the JSON files in the folder give, by the name that ratios.json uses."""
    found: dict[str, float] = {}
    for reader, file in ((_recorder, "recorder"), (_topk, "topk"), (_answers, "answers")):
        path = folder / f"{file}.json"
        if path.is_file():
            found.update(reader(json.loads(path.read_text())))
    return found


def _recorder(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for kind in ("cpu", "wall"):
        yield f"recorder: {kind} time to that without", result[f"{kind}_ratio"]


def _topk(results: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for row in results:
        case = f"top-k: {row['memory']}, {row['n']} queries, k = {row['k']}"
        for peer in ("default", "tuned"):
            ratio = row["ms"][f"faiss {peer}"] / row["ms"]["dualform auto"]
            yield f"{case}, rate to FAISS {peer}", ratio


def _answers(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in result["absolute"]:
        yield f"absolute sums: {row['memory']}, rate to the product", row["rate_to_product"]


def table(ratios: list[Ratio], now: dict[str, float]) -> str:
    """One line per kept ratio: name, kept value, measured value, verdict."""
    width = max(len(ratio.name) for ratio in ratios)
    lines = []
    for ratio in ratios:
        value = now.get(ratio.name)
        said = "" if value is None else f"{value:.2f}"
        verdict = ratio.verdict(value)
        lines.append(f"{ratio.name:{width}} {ratio.value:8.2f} {said:>8}  {verdict}")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with recorder.json, topk.json, answers.json")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    arguments = parser.parse_args()
    print(
        f"Kept in {KEPT.name} ({json.loads(KEPT.read_text())[arguments.size]['made']}), then now:"
    )
    print(table(kept(arguments.size), measured(arguments.folder)))


if __name__ == "__main__":
    main()
