"""A study as its YAML file says it: validated, frozen, nothing accepted and ignored."""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

TASKS = ("mnist", "fashion")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


class ConfigError(Exception):
    """The YAML file is not a study; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Phase:
    """A part of training.

    Attributes:
        tasks: Data sets that are shuffled together: "mnist", "fashion".
        steps: Optimizer steps.
    """

    tasks: tuple[str, ...]
    steps: int


@dataclass(frozen=True)
class Variant:
    """One setting of the optimizer, and what its answers must hold to.

    Attributes:
        clip: Largest norm of the whole gradient.
        max_weight_error: Bound on |dual - (W_T - W_0)| / |W_T - W_0| per layer, Frobenius norm.
        max_output_error: Bound on the largest |dual - layer| / |layer| over the images asked.
        momentum: SGD's.
        optimizer: "sgd" or "adamw".
        warm_up: Steps in which lr rises to its value, to fall to 0 along a cosine by the last step;
            0 for an lr that stays.
    """

    lr: float
    clip: float
    max_weight_error: float
    max_output_error: float
    momentum: float = 0.0
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    warm_up: int = 0

    @property
    def title(self) -> str:
        """The optimizer and its settings, in words."""
        words = [OPTIMIZERS[self.optimizer], f"lr {self.lr:g}"]
        if self.optimizer == "sgd":
            words.append(f"momentum {self.momentum:g}")
        if self.weight_decay:
            words.append(f"weight decay {self.weight_decay:g}")
        if self.warm_up:
            words.append(f"{self.warm_up} steps of warm-up, then a cosine to 0")
        return ", ".join([*words, f"clip {self.clip:g}"])


@dataclass(frozen=True)
class Ask:
    """Questions that measure the server, on MNIST.

    Attributes:
        images: Test images whose outputs are compared, from the start of the test set.
        top_k_queries: Queries in one top-k call.
        k: Rows per query.
        max_server_mb: Bound on the server's anonymous and shared memory at its peak, 10^6 bytes.
    """

    images: int
    top_k_queries: int
    k: int
    max_server_mb: int


@dataclass(frozen=True)
class Votes:
    """The paper's Table 1: the label with the largest sum of absolute weights, on MNIST.

    Attributes:
        images: Test images, from the start of the test set.
    """

    images: int


@dataclass(frozen=True)
class Masks:
    """Forward passes in dual form with one task's rows masked.

    Attributes:
        task: Whose rows are masked.
        kept: The task whose accuracy is looked at.
        images: Test images of each task, from the start of its test set.
        sweep: The mask lifted for rows of steps before s, for each of these s.
        misled: The label of `kept` among whose test images one is looked for that `task`'s rows
            send wrong.
        taken_for: The label that it is preferably taken for.
    """

    task: str
    kept: str
    images: int
    sweep: tuple[int, ...]
    misled: int
    taken_for: int

    def edges(self, steps: int) -> list[int]:
        """The steps at which the mask can end, in a training of so many: from 0 to the last."""
        return sorted({0, *self.sweep, steps})


@dataclass(frozen=True)
class Figure:
    """A test image whose figures are drawn.

    Attributes:
        name: Leads the files' names.
        task: Its data set.
        label: Its label; the first such test image that the model classifies rightly.
        astray: Instead the image that masks found to be led astray.
    """

    name: str
    task: str
    label: int
    astray: bool = False


@dataclass(frozen=True)
class Study:
    """One study: a network, its training, and the questions.

    Attributes:
        hidden: Width of each hidden layer.
        phases: Parts of training, one after the other, with one optimizer.
        seeds: One run each.
        variants: Optimizer settings by name; each is trained, indexed and asked on its own.
        verify: Whether `dualform index verify` is run on each index.
        ask, votes, masks, figures: Questions; None where the study does not ask them.
    """

    name: str
    hidden: tuple[int, ...]
    batch_size: int
    phases: tuple[Phase, ...]
    seeds: tuple[int, ...]
    variants: dict[str, Variant]
    verify: bool
    ask: Ask | None = None
    votes: Votes | None = None
    masks: Masks | None = None
    figures: tuple[Figure, ...] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def rows(self) -> int:
        """Rows that each layer records."""
        return self.steps * self.batch_size

    @property
    def tasks(self) -> tuple[str, ...]:
        """Data sets in the order in which training first sees them."""
        return tuple(dict.fromkeys(task for phase in self.phases for task in phase.tasks))


def load(path: Path) -> Study:
    """Read a study.

    Raises:
        ConfigError: Not readable, not YAML, or a key that is unknown, missing or of the wrong type.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    study: Study = read(Study, data, str(path))
    _check(study, str(path))
    return study


def read(kind: type[Any], data: Any, where: str) -> Any:
    """Data from YAML as `kind`.

    Args:
        kind: A dataclass, dict[str, …], tuple[…, ...], `… | None` or a plain type.
        data: What YAML gave.
        where: Leads messages: the file, then the key.

    Raises:
        ConfigError: A key that is unknown or missing, or a wrong type.
    """
    if is_dataclass(kind):
        return _read_keys(kind, data, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return read(get_args(kind)[0], data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise ConfigError(f"{where} must be a mapping of names")
        return {str(key): read(get_args(kind)[1], data[key], f"{where}.{key}") for key in data}
    if origin is tuple:
        if not isinstance(data, list):
            raise ConfigError(f"{where} must be a list")
        return tuple(read(get_args(kind)[0], item, where) for item in data)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        hint = "; YAML needs a dot, as in 1.0e-4" if kind is float else ""
        raise ConfigError(f"{where} is {data!r}; it must be of type {kind.__name__}{hint}")
    return data


def _read_keys(kind: type[Any], data: Any, where: str) -> Any:
    """A mapping as the dataclass whose fields its keys name."""
    hints = get_type_hints(kind)
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must have the keys {', '.join(hints)}")
    unknown = [key for key in data if key not in hints]
    missing = [key for key in needed if key not in data]
    if unknown or missing:
        found = f"unknown key {unknown[0]!r}" if unknown else f"no key {missing[0]!r}"
        raise ConfigError(f"{where}: {found}; the keys are {', '.join(hints)}")
    return kind(**{key: read(hints[key], data[key], f"{where}: {key}") for key in data})


def _check(study: Study, path: str) -> None:
    """What types alone don't say."""
    _check_training(study, path)
    if study.ask is not None:
        for key in ("images", "top_k_queries", "k"):
            _at_least(1, getattr(study.ask, key), f"{path}: ask.{key}")
    if study.votes is not None:
        _at_least(1, study.votes.images, f"{path}: votes.images")
    if study.masks is not None:
        _check_masks(study.masks, study, path)
    for figure in study.figures or ():
        _check_figure(figure, study, f"{path}: figures: {figure.name}")


def _check_training(study: Study, path: str) -> None:
    _at_least(1, study.batch_size, f"{path}: batch_size")
    for phase in study.phases:
        _at_least(1, phase.steps, f"{path}: phases: steps")
    for width in study.hidden:
        _at_least(1, width, f"{path}: hidden")
    for key in ("phases", "seeds", "variants"):
        if not getattr(study, key):
            raise ConfigError(f"{path}: {key} is empty; name at least one")
    for name, variant in study.variants.items():
        if not name.isidentifier():
            raise ConfigError(f"{path}: variants.{name} names a folder: letters, digits and _ only")
        _check_variant(variant, f"{path}: variants.{name}")
    for phase in study.phases:
        if not phase.tasks or any(task not in TASKS for task in phase.tasks):
            raise ConfigError(f"{path}: phases: tasks must hold some of {', '.join(TASKS)}")


def _check_variant(variant: Variant, where: str) -> None:
    if variant.optimizer not in OPTIMIZERS:
        raise ConfigError(f"{where}: optimizer must be one of {', '.join(OPTIMIZERS)}")
    if variant.optimizer != "sgd" and variant.momentum:
        raise ConfigError(f"{where}: momentum is SGD's; leave it out")
    _at_least(0, variant.warm_up, f"{where}: warm_up")


def _check_masks(masks: Masks, study: Study, path: str) -> None:
    _at_least(1, masks.images, f"{path}: masks.images")
    for key in ("task", "kept"):
        if getattr(masks, key) not in study.tasks:
            raise ConfigError(f"{path}: masks.{key} must be one of {', '.join(study.tasks)}")
    for key in ("misled", "taken_for"):
        if not 0 <= getattr(masks, key) <= 9:
            raise ConfigError(f"{path}: masks.{key} is a label, 0 to 9")
    if any(not 0 <= step <= study.steps for step in masks.sweep):
        raise ConfigError(f"{path}: masks.sweep holds steps from 0 to {study.steps}")


def _check_figure(figure: Figure, study: Study, where: str) -> None:
    if not figure.name.isidentifier():
        raise ConfigError(f"{where}: name leads files: letters, digits and _ only")
    if figure.task not in study.tasks:
        raise ConfigError(f"{where}: task must be one of {', '.join(study.tasks)}")
    if figure.astray and study.masks is None:
        raise ConfigError(f"{where}: astray needs masks")


def _at_least(least: int, value: int, where: str) -> None:
    if value < least:
        raise ConfigError(f"{where} is {value}; at least {least} is needed")
