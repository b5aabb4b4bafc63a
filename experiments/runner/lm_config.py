"""A language-model study as its YAML file says it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from runner.config import ConfigError, read

TEXTS = ("aesop", "wikitext-2")


@dataclass(frozen=True)
class Queries:
    """What is asked: keys of the last tokens of prompts.

    Attributes:
        test: Prompts from the test text.
        training: Prompts from the training text.
        prompt: Their length in tokens; the state before is zero.
        top: Training positions shown for each.
    """

    test: int
    training: int
    prompt: int
    top: int


@dataclass(frozen=True)
class Variant:
    """A size of network and training.

    Attributes:
        embedding: Length of a token's embedding.
        hidden: The LSTM's.
        batch: Lanes of the text that are read side by side.
        time: Tokens per step and lane (truncated backpropagation through time).
        steps: Adam's.
        lr: Adam's.
        l2: Adam's weight decay, added to the gradient.
        clip: Largest norm of the whole gradient.
        dropout: On the embedding.
        projection: Width of a linear layer between embedding and LSTM; None for no such layer.
        tokens: How many tokens of the training text are used, from its start; None for all.
    """

    embedding: int
    hidden: int
    batch: int
    time: int
    steps: int
    lr: float
    l2: float
    clip: float
    dropout: float
    projection: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: Leads the results' files.
        text: "aesop" (characters) or "wikitext-2" (words).
        seed: Of weights, dropout and the choice of prompts.
        queries: What is asked.
        default: The variant that runs where none is named.
        variants: By name.
    """

    name: str
    text: str
    seed: int
    queries: Queries
    default: str
    variants: dict[str, Variant]


def load(path: Path) -> Study:
    """Read a study.

    Raises:
        ConfigError: Not readable, not YAML, or a key that is unknown, missing or wrong.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    study: Study = read(Study, data, str(path))
    if study.text not in TEXTS:
        raise ConfigError(f"{path}: text is {study.text!r}; it must be one of {', '.join(TEXTS)}")
    if study.default not in study.variants:
        raise ConfigError(f"{path}: default must be one of {', '.join(study.variants)}")
    for name, variant in study.variants.items():
        for field in fields(variant):
            value = getattr(variant, field.name)
            if field.type in ("int", "int | None") and value is not None and value < 1:
                raise ConfigError(f"{path}: variants.{name}.{field.name} must be at least 1")
    return study
