"""The texts of the language models, as tokens; and passages around a token, for people."""

from __future__ import annotations

import html
import lzma
from dataclasses import dataclass
from pathlib import Path

import torch

# The whole Project Gutenberg file's length in characters: the authors' test part is a tenth of it.
_AESOP_TOTAL = 177_514


@dataclass(frozen=True)
class Text:
    """A text in two parts.

    Attributes:
        training: int64 [n], token numbers.
        test: int64 [m].
        vocabulary: The tokens by number: characters, or words.
    """

    training: torch.Tensor
    test: torch.Tensor
    vocabulary: list[str]

    @property
    def separator(self) -> str:
        """What stands between two tokens."""
        return "" if all(len(token) == 1 for token in self.vocabulary) else " "


@dataclass(frozen=True)
class Passage:
    """A token and the text around it."""

    before: str
    token: str
    after: str

    def terminal(self) -> str:
        """One line, the token in reverse video."""
        return _line(self.before) + f"\033[7m{_shown(self.token)}\033[0m" + _line(self.after)

    def plain(self) -> str:
        """One line, the token between brackets."""
        return f"{_line(self.before)}⟦{_shown(self.token)}⟧{_line(self.after)}"

    def html(self) -> str:
        """With the token in a mark element."""
        token = html.escape(_shown(self.token))
        return f"{html.escape(self.before)}<mark>{token}</mark>{html.escape(self.after)}"


def load(name: str, data: Path, tokens: int | None) -> Text:
    """Read a text.

    Args:
        name: "aesop" or "wikitext-2".
        data: The folder that holds `aesop/` and `wikitext-2/`.
        tokens: How many tokens of the training part to take, from its start; None for all.

    Raises:
        FileNotFoundError: A file is missing.
    """
    training, test, known = _aesop(data) if name == "aesop" else _wikitext(data)
    if tokens is not None:
        training = training[:tokens]
        # Words that only the rest has would make the output layer large for nothing.
        known = sorted(set(training) | {"<unk>"} if name != "aesop" else set(training) | set(test))
    numbers = {token: number for number, token in enumerate(known)}
    unknown = numbers.get("<unk>", 0)
    return Text(
        torch.tensor([numbers[token] for token in training]),
        torch.tensor([numbers.get(token, unknown) for token in test]),
        known,
    )


def passage(text: Text, part: torch.Tensor, position: int, around: int) -> Passage:
    """The token at a position of a part, and so many tokens before and after it."""

    def joined(first: int, last: int) -> str:
        return text.separator.join(text.vocabulary[i] for i in part[max(first, 0) : last].tolist())

    before, after = joined(position - around, position), joined(position + 1, position + 1 + around)
    space = text.separator
    token = text.vocabulary[int(part[position])]
    return Passage(before + space, token, space + after)


def _aesop(data: Path) -> tuple[list[str], list[str], list[str]]:
    content = (data / "aesop" / "fables.txt").read_text(encoding="utf-8")
    split = len(content) - _AESOP_TOTAL // 10
    return list(content[:split]), list(content[split:]), sorted(set(content))


def _wikitext(data: Path) -> tuple[list[str], list[str], list[str]]:
    parts = {}
    for part in ("train", "valid", "test"):
        with lzma.open(data / "wikitext-2" / f"wiki.{part}.tokens.xz", "rt", encoding="utf-8") as f:
            parts[part] = [word for line in f for word in (*line.split(), "<eos>")]
    return parts["train"], parts["test"], sorted(set().union(*parts.values()))


def _shown(token: str) -> str:
    return {"\n": "⏎", " ": "␣"}.get(token, token)


def _line(text: str) -> str:
    return text.replace("\n", "⏎")
