"""What a language-model study found: for the terminal, as Markdown, HTML and JSON."""

from __future__ import annotations

import html
import platform
from dataclasses import asdict
from typing import Any

import torch

from runner.lm_ask import Answer, Facts, Match
from runner.lm_config import Study

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "mark{background:#e69f00;padding:0 .15em}q{white-space:pre-wrap;quotes:none;"
    "font-family:ui-monospace,monospace;font-size:.9em}td{vertical-align:top;padding:.3rem}"
)


def terminal(answers: list[Answer]) -> str:
    """The answers, the token in reverse video."""
    lines = []
    for answer in answers:
        lines.append(f"\n{_title(answer)}\n  {answer.prompt.terminal()}")
        for title, matches in _lists(answer):
            lines.append(f"  {title}:")
            lines += [f"    {_score(m)}  {m.passage.terminal()}" for m in matches]
    return "\n".join(lines)


def page(study: Study, name: str, answers: list[Answer], facts: Facts, command: str) -> str:
    """The result as Markdown."""
    variant = study.variants[name]
    full = study.variants.get("full")
    settings = ", ".join(f"{k} {v}" for k, v in asdict(variant).items() if v is not None)
    lines = [
        f"# {study.name}: which places of the text made a prediction",
        "",
        f"    {command}",
        "",
        f"Variant `{name}`: {settings}.",
    ]
    if name != "full" and full is not None:
        authors = ", ".join(f"{k} {v}" for k, v in asdict(full).items() if v is not None)
        lines.append(
            f"**Scaled down** so that two CPU cores train it twice in minutes. The authors' own "
            f"setting is the variant `full` ({authors}): add `--variant full`."
        )
    if study.text != "aesop" and variant.tokens is not None:
        lines.append(
            "Words of the test text that the training part lacks count as `<unk>`, which makes its "
            "perplexity lower than that of the whole vocabulary would be."
        )
    unit = "characters" if study.text == "aesop" else "words"
    lines += [
        "",
        f"The training text has {facts.tokens:,} {unit} of {facts.vocabulary:,} kinds; every "
        f"position was seen about {facts.epochs:.1f} times, in {facts.rows:,} rows with keys "
        f"[h; x] of length {facts.key:,}. Perplexity: {facts.perplexity['test']:.1f} on the test "
        f"text, {facts.perplexity['training']:.1f} on the training text (first 20,000 tokens).",
        "",
        f"A query is the key of a prompt's last token after {study.queries.prompt} tokens from "
        "zero state. A training position's score is summed over every update in which it was seen. "
        "*Absolute*: the sum of |q.k|, as the authors rank, from a second training with the "
        "queries known (replay). *Signed*: the sum of q.k, from key sums per position kept in the "
        "first training. A sum counts every time that its position was seen, so where the steps "
        "are no whole number of epochs, positions that were seen once more come first. Adam: "
        "these weights are exact; contributions to the output would not be.",
        "",
        "| | |",
        "|---|---|",
        f"| first training, recorded, key sums kept | {facts.seconds[0]:.0f} s |",
        f"| second training, replayed | {facts.seconds[1]:.0f} s |",
        f"| peak memory of the process | {facts.peak_bytes / 1e6:,.0f} MB |",
        f"| of it, key sums per position | {facts.tokens * facts.key * 4 / 1e6:,.0f} MB |",
        f"| keys of all rows, had they been stored | {facts.history_bytes / 1e6:,.0f} MB |",
        "| loss curves and digests of both trainings | equal, every step |",
        "| signed sums, first training against replay: largest difference | "
        f"{facts.signed_difference:.1e} of the position's own absolute sum |",
        "",
        f"On {platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}; "
        "the machine was shared while this ran, so seconds are upper bounds.",
    ]
    for answer in answers:
        lines += ["", f"## {_title(answer)}", "", f"`{_code(answer.prompt.plain())}`"]
        for title, matches in _lists(answer):
            lines += ["", f"{title}:", "", "| position | score | text |", "|---|---|---|"]
            lines += [
                f"| {m.position:,} | {m.score:.4g} | `{_code(m.passage.plain())}` |"
                for m in matches
            ]
    return "\n".join(lines) + "\n"


def web(study: Study, answers: list[Answer]) -> str:
    """The answers as one HTML page, the tokens marked."""
    parts = []
    for answer in answers:
        parts.append(f"<h2>{html.escape(_title(answer))}</h2><p><q>{answer.prompt.html()}</q></p>")
        for title, matches in _lists(answer):
            rows = "".join(
                f"<tr><td>{m.position:,}</td><td>{m.score:.4g}</td>"
                f"<td><q>{m.passage.html()}</q></td></tr>"
                for m in matches
            )
            parts.append(f"<h3>{html.escape(title)}</h3><table>{rows}</table>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{study.name}</title>'
        f"<style>{_STYLE}</style><h1>{study.name}</h1>{''.join(parts)}</html>\n"
    )


def data(study: Study, name: str, answers: list[Answer], facts: Facts, command: str) -> Any:
    """The result as JSON's types."""
    return {
        "study": study.name,
        "variant": name,
        "settings": asdict(study.variants[name]),
        "command": command,
        "facts": asdict(facts),
        "answers": [asdict(answer) for answer in answers],
    }


def _title(answer: Answer) -> str:
    return (
        f"Prompt from the {answer.part} text, position {answer.position:,}; expected next: "
        f"{answer.predicted!r}"
    )


def _lists(answer: Answer) -> list[tuple[str, list[Match]]]:
    return [("Largest absolute sums", answer.absolute), ("Largest signed sums", answer.signed)]


def _score(match: Match) -> str:
    return f"{match.position:>9,}  {match.score:>10.4g}"


def _code(text: str) -> str:
    return text.replace("`", "'").replace("|", "¦")
