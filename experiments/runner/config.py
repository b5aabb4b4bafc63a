"""A study as its YAML file says it: validated, frozen, nothing accepted and ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml


class ConfigError(Exception):
    """The YAML file is not a study; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Variant:
    """One setting of the optimizer, and what its answers must hold to.

    Attributes:
        clip: Largest norm of the whole gradient.
        max_weight_error: Bound on |dual - (W_T - W_0)| / |W_T - W_0| per layer, Frobenius norm.
        max_output_error: Bound on the largest |dual - layer| / |layer| over the images asked.
    """

    lr: float
    momentum: float
    clip: float
    max_weight_error: float
    max_output_error: float


@dataclass(frozen=True)
class Ask:
    """What is asked of the server.

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
class Study:
    """One study: a network, its training, and the questions.

    Attributes:
        hidden: Width of each hidden layer.
        variants: Optimizer settings by name; each is trained, indexed and asked on its own.
    """

    name: str
    hidden: tuple[int, ...]
    batch_size: int
    steps: int
    seed: int
    variants: dict[str, Variant]
    ask: Ask

    @property
    def rows(self) -> int:
        """Rows that each layer records."""
        return self.steps * self.batch_size


def load(path: Path) -> Study:
    """Read a study.

    Raises:
        ConfigError: Not readable, not YAML, or a key that is unknown, missing or of the wrong type.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    study = _read(Study, data, str(path))
    assert isinstance(study, Study)
    for key in ("batch_size", "steps"):
        _at_least(1, getattr(study, key), f"{path}: {key}")
    for key in ("images", "top_k_queries", "k"):
        _at_least(1, getattr(study.ask, key), f"{path}: ask.{key}")
    for width in study.hidden:
        _at_least(1, width, f"{path}: hidden")
    if not study.variants:
        raise ConfigError(f"{path}: variants is empty; name at least one")
    for name in study.variants:
        if not name.isidentifier():
            raise ConfigError(f"{path}: variants.{name} names a folder: letters, digits and _ only")
    return study


def _at_least(least: int, value: int, where: str) -> None:
    if value < least:
        raise ConfigError(f"{where} is {value}; at least {least} is needed")


def _read(kind: Any, data: Any, where: str) -> Any:
    """Data from YAML as `kind`: a dataclass, dict[str, …], tuple[int, …] or a plain type."""
    if kind in (Study, Variant, Ask):
        hints = get_type_hints(kind)
        if not isinstance(data, dict):
            raise ConfigError(f"{where} must have the keys {', '.join(hints)}")
        unknown = [key for key in data if key not in hints]
        missing = [key for key in hints if key not in data]
        if unknown or missing:
            found = f"unknown key {unknown[0]!r}" if unknown else f"no key {missing[0]!r}"
            raise ConfigError(f"{where}: {found}; the keys are {', '.join(hints)}")
        return kind(**{key: _read(hints[key], data[key], f"{where}: {key}") for key in hints})
    origin = get_origin(kind)
    if origin is dict:
        if not isinstance(data, dict):
            raise ConfigError(f"{where} must be a mapping of names")
        return {str(key): _read(get_args(kind)[1], data[key], f"{where}.{key}") for key in data}
    if origin is tuple:
        if not isinstance(data, list):
            raise ConfigError(f"{where} must be a list")
        return tuple(_read(get_args(kind)[0], item, where) for item in data)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        hint = "; YAML needs a dot, as in 1.0e-4" if kind is float else ""
        raise ConfigError(f"{where} is {data!r}; it must be of type {kind.__name__}{hint}")
    return data
