"""The pictures of docs/idea.md, with the numbers of its example: docs/images/idea-*.svg.

python scripts/idea_pictures.py [FOLDER]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Vector = tuple[float, float]
# Okabe and Ito's palette, as in the demo's picture.
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
INK, GREY, BLUE, VERMILION, GREEN = "#222222", "#767676", "#0072B2", "#D55E00", "#00795A"
KEYS: list[Vector] = [(2, 1), (1, -1)]
TARGETS: list[Vector] = [(1, 2), (1.5, -0.5)]
QUERY: Vector = (1, 2)
RATE = 0.5


@dataclass(frozen=True)
class Example:
    """What two steps of SGD from the identity come to: loss ½ |W x - target|².

    Attributes:
        values: Minus the gradient at the output, of each step.
        weights: Key times query.
        added: Rate times weight times value.
        output: Of the trained layer, by its weight.
    """

    values: list[Vector]
    weights: list[float]
    added: list[Vector]
    output: Vector


def example() -> Example:
    """Train, then multiply."""
    (a, b), (c, d) = (1.0, 0.0), (0.0, 1.0)
    values = []
    for (x, y), (p, q) in zip(KEYS, TARGETS, strict=True):
        e, f = p - (a * x + b * y), q - (c * x + d * y)
        a, b, c, d = a + RATE * e * x, b + RATE * e * y, c + RATE * f * x, d + RATE * f * y
        values.append((e, f))
    weights = [x * QUERY[0] + y * QUERY[1] for x, y in KEYS]
    added = [(RATE * w * e, RATE * w * f) for w, (e, f) in zip(weights, values, strict=True)]
    output = (a * QUERY[0] + b * QUERY[1], c * QUERY[0] + d * QUERY[1])
    return Example(values, weights, added, output)


def memory(of: Example) -> str:
    """Query, keys, weights, values, sum: from left to right."""
    lines = [_text(60, 32, "query", bold=True), _box(20, 150, 80, "x", QUERY, VERMILION)]
    heads = ((230, "keys"), (385, "weights"), (520, "values"), (665, "added"), (830, "output"))
    lines += [_text(x, 32, word, bold=True) for x, word in heads]
    for number, y in enumerate((70, 230)):
        key, value = KEYS[number], of.values[number]
        lines += [
            _arrow((104, 172), (186, y + 22), GREY),
            _box(190, y, 80, f"x{_sub(number)}", key, BLUE),
            _arrow((274, y + 22), (346, y + 22), GREY),
            _text(385, y + 28, f"{_sign(of.weights[number])}", colour=INK, size=20, bold=True),
            _text(385, y + 52, f"x{_sub(number)} · x", colour=GREY, size=13),
            _text(442, y + 28, TIMES, colour=GREY, size=18),
            _box(470, y, 100, f"e{_sub(number)}", value, GREEN),
            _text(592, y + 28, f"{TIMES} ½", colour=GREY, size=16),
            _box(620, y, 100, "", of.added[number], INK),
            _arrow((724, y + 22), (776, 172 + (number * 2 - 1) * 14), GREY),
        ]
    lines += [
        _box(620, 150, 100, "W₀x", QUERY, GREY),
        _arrow((724, 172), (776, 172), GREY),
        _box(780, 150, 100, "W₂x", of.output, VERMILION),
        _text(830, 222, "the sum", colour=GREY, size=13),
        _text(665, 222, "initial part", colour=GREY, size=13),
    ]
    return _svg(900, 310, "A query against a memory of two rows", lines)


def plane(of: Example) -> str:
    """Keys and query in the plane of inputs, the output as a chain in the plane of outputs."""
    lines = [_text(190, 28, "inputs: keys and query", bold=True)]
    lines += [_text(620, 28, "outputs: what was added", bold=True)]

    def left(point: Vector) -> Vector:
        return 150 + 80 * point[0], 240 - 80 * point[1]

    def right(point: Vector) -> Vector:
        return 670 + 80 * point[0], 380 - 80 * point[1]

    lines += [*_axes(left, (-1, 3), (-1, 2)), *_axes(right, (-2, 2), (0, 4))]
    for number, key in enumerate(KEYS):
        lines.append(_arrow(left((0, 0)), left(key), BLUE, 3))
        x, y = left(key)
        said = f"x{_sub(number)}: weight {_sign(of.weights[number])}"
        lines.append(_text(x + 8, y + 20, said, BLUE, 15, anchor="start"))
    lines.append(_arrow(left((0, 0)), left(QUERY), VERMILION, 3))
    x, y = left(QUERY)
    lines.append(_text(x + 10, y + 4, "query x", VERMILION, 15, anchor="start"))
    at: Vector = (0, 0)
    chain = [(QUERY, GREY, "W₀x"), *((each, GREEN, "") for each in of.added)]
    for number, (step, colour, word) in enumerate(chain):
        to = (at[0] + step[0], at[1] + step[1])
        lines.append(_arrow(right(at), right(to), colour, 3))
        x, y = right(((at[0] + to[0]) / 2, (at[1] + to[1]) / 2))
        said = word or f"½ a{_sub(number - 1)} e{_sub(number - 1)}"
        down = 22 if number == 0 else -12
        lines.append(
            _text(
                x + 14 * (number < 2),
                y + down,
                said,
                colour,
                15,
                anchor="start" if number < 2 else "middle",
            )
        )
        at = to
    lines.append(_arrow(right((0, 0)), right(of.output), VERMILION, 3, dashed=True))
    x, y = right(of.output)
    lines.append(_text(x - 6, y + 24, "output W₂x", VERMILION, 15, anchor="end"))
    return _svg(900, 420, "The worked example in the plane", lines)


def _axes(place: Callable[[Vector], Vector], across: Vector, up: Vector) -> list[str]:
    lines = []
    for x in range(int(across[0]), int(across[1]) + 1):
        lines.append(_line(place((x, up[0])), place((x, up[1])), "#dddddd" if x else "#999999"))
    for y in range(int(up[0]), int(up[1]) + 1):
        lines.append(
            _line(place((across[0], y)), place((across[1], y)), "#dddddd" if y else "#999999")
        )
    return lines


def _box(x: float, y: float, width: float, name: str, vector: Vector, colour: str) -> str:
    above = _text(x + width / 2, y - 8, name, colour, 15) if name else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="44" rx="6" fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
        + _text(x + width / 2, y + 28, f"({_sign(vector[0])}, {_sign(vector[1])})", colour, 17)
        + above
    )


def _arrow(
    start: Vector, end: Vector, colour: str, width: float = 1.5, dashed: bool = False
) -> str:
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    size = 5 + 2.5 * width
    corners = [end]
    for turn in (2.7, -2.7):
        corners.append(
            (end[0] + size * math.cos(angle + turn), end[1] + size * math.sin(angle + turn))
        )
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    short = (end[0] - size * 0.8 * math.cos(angle), end[1] - size * 0.8 * math.sin(angle))
    return (
        _line(start, short, colour, width, dashed) + f'<polygon points="{points}" fill="{colour}"/>'
    )


def _line(start: Vector, end: Vector, colour: str, width: float = 1, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="7 5"' if dashed else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    colour: str = INK,
    size: int = 16,
    *,
    bold: bool = False,
    anchor: str = "middle",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight}>{words}</text>'
    )


def _sub(number: int) -> str:
    return "₀₁"[number]


def _sign(number: float) -> str:
    """With a minus as long as a plus."""
    return f"{number + 0.0:g}".replace("-", MINUS)


def _svg(width: int, height: int, title: str, lines: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif"><title>{title}</title>'
    )
    paper = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, paper, *lines, "</svg>"]) + "\n"


def main(folder: Path) -> None:
    of = example()
    for name, picture in (("idea-memory", memory(of)), ("idea-plane", plane(of))):
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1] / "docs" / "images"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
