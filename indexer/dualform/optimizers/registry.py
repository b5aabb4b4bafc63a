"""Which family an optimizer belongs to."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch

from dualform.optimizers.adadelta import Adadelta
from dualform.optimizers.adafactor import Adafactor
from dualform.optimizers.adagrad import Adagrad
from dualform.optimizers.adam import Adam
from dualform.optimizers.adamax import Adamax
from dualform.optimizers.family import Family
from dualform.optimizers.lamb import Lamb
from dualform.optimizers.lion import Lion
from dualform.optimizers.nadam import NAdam
from dualform.optimizers.radam import RAdam
from dualform.optimizers.rmsprop import RMSprop
from dualform.optimizers.rprop import Rprop
from dualform.optimizers.sgd import SGD
from dualform.optimizers.unknown import Unknown

_ALL = (
    SGD(),
    Adam(),
    NAdam(),
    RAdam(),
    Adamax(),
    RMSprop(),
    Adagrad(),
    Adadelta(),
    Adafactor(),
    Rprop(),
    Lion(),
    Lamb(),
    Unknown(),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name, as the manifest names it. A new one is a file and a line here."""

_OF_CLASS = {name: family for family in _ALL for name in family.classes}

_NEVER: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "its steps are not linear in the gradients, so no part of them is a row's",
    torch.optim.SparseAdam: "its gradients are sparse, and those of recorded layers never are",
}


class Found(NamedTuple):
    """What an optimizer is: its family, the name of its class, and why its steps can't be read
    where the family is the unknown one."""

    family: Family
    name: str
    why_not: str | None


def family_of(optimizer: torch.optim.Optimizer) -> Found:
    """The family whose steps an optimizer takes.

    A subclass that changes neither the step nor what it reads from its groups counts as the class
    that it derives from, and goes by its name. Classes are told by where they are defined and what
    they are called: those of other packages than torch are never imported.
    """
    kind = type(optimizer)
    unknown = FAMILIES[Unknown.name]
    for base in kind.__mro__:
        family = _OF_CLASS.get(f"{base.__module__}.{base.__qualname__}")
        if family is None:
            continue
        if not _steps_as(kind, base):
            why = f"{kind.__name__} overrides the step of {_title(base)}"
            return Found(unknown, kind.__name__, f"{why}, so what it does is not known")
        reason = family.why_not(optimizer)
        return Found(family if reason is None else unknown, base.__name__, reason)
    for refused, why in _NEVER.items():
        if isinstance(optimizer, refused):
            return Found(unknown, kind.__name__, why)
    known = ", ".join(name for name in FAMILIES if name != Unknown.name)
    return Found(unknown, kind.__name__, f"it is of no family that is known ({known})")


def _title(kind: type) -> str:
    """What users call an optimizer's class: "torch.optim.AdamW"."""
    package, _, rest = kind.__module__.partition(".optim")
    return f"{package}.optim.{kind.__name__}" if rest else f"{kind.__module__}.{kind.__name__}"


def _steps_as(kind: type, base: type) -> bool:
    """Whether a class steps by its base's code; torch wraps `step` once an instance exists."""
    return all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name))
        for name in ("step", "_init_group")
        if hasattr(base, name)
    )
