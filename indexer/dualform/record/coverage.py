"""What of a model is recorded and what is left out, and the one line that says so at the start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

LOGGER = logging.getLogger("dualform.record.start")
"""Of the line at the start; `setLevel(logging.WARNING)` silences it."""
if LOGGER.level == logging.NOTSET:  # the root's level would hide it
    LOGGER.setLevel(logging.INFO)

_NAMED = 3
"""So many layers of a group are named, and the others counted."""


@dataclass(frozen=True)
class Coverage:
    """Which of a model's matrices are recorded.

    Attributes:
        layers: How many layers are recorded.
        recorded: Elements of their weights.
        matrices: Elements of all of the model's parameters with two axes or more.
        trained: Elements of those of them that training moves.
        recorded_trained: Elements of the recorded weights that it moves.
        left_out: Modules that hold matrices and are not recorded, by reason; of a module that holds
            other modules and is of no kind, as of the model itself, the parameters.
        without: Classes of modules with parameters of which none is a matrix, such as norms: there
            are no keys, and nothing of them is recorded.
    """

    layers: int
    recorded: int
    matrices: int
    trained: int
    recorded_trained: int
    left_out: Mapping[str, tuple[str, ...]]
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = 100 * self.recorded / max(1, self.matrices)
        plural = "" if self.layers == 1 else "s"
        text = f"{self.layers} layer{plural}, {share:.1f} % of the model's matrix parameters"
        beside = []
        if self.trained < self.matrices:
            share = 100 * self.recorded_trained / max(1, self.trained)
            beside.append(f"{share:.1f} % of those that train")
        if self.without:
            verb = "holds" if len(self.without) == 1 else "hold"
            beside.append(f"{some_of(self.without)} {verb} none")
        return f"{text} ({'; '.join(beside)})" if beside else text

    def first_line(
        self,
        step_bytes: int,
        options: str,
        to: str,
        ranks: int | None = None,
        packed: bool = False,
    ) -> str:
        """What is recorded, what it takes, and what is left out.

        Args:
            step_bytes: What a step takes, on average.
            options: That leave rows out; may be empty.
            to: Where it goes, from ", to" on; may be empty.
            ranks: How many processes record, each as much; None for one.
            packed: What a step takes is packed on the way, and said as it is before.
        """
        each = "" if ranks is None else f" on each of {ranks} ranks"
        line = f"dualform: recording {self}{each}, {size_text(step_bytes)} per step"
        line += " before packing" if packed else ""
        line += f" ({options}){to}" if options else to
        left_out = self.left_out_text()
        return f"{line}. Left out: {left_out}" if left_out else line

    def left_out_text(self) -> str:
        """The groups and their reasons; empty where nothing is left out."""
        groups = []
        for reason, names in self.left_out.items():
            groups.append(f"{some_of(list(map(repr, names)))} ({reason})")
        return "; ".join(groups)


def cover(
    model: nn.Module,
    modules: Collection[nn.Module],
    reasons: Mapping[str, str],
    unasked: Collection[nn.Module],
    layers: int,
    held: Callable[[torch.Tensor], bool],
) -> Coverage:
    """Count.

    Args:
        model: The whole model.
        modules: The modules whose weights are recorded.
        reasons: Why a module is not, by name, where that is known.
        unasked: Modules that might be recorded, had the user not said which layers to record.
        layers: How many layers these modules make.
        held: Whether the optimizer holds a parameter.
    """
    recorded_ids, unasked_ids = set(map(id, modules)), set(map(id, unasked))
    seen: set[int] = set()
    counts = dict.fromkeys(("recorded", "matrices", "trained", "recorded_trained"), 0)
    groups: dict[str, list[str]] = {}
    # Recorded ones first: a tied weight counts as recorded.
    ordered = sorted(model.named_modules(), key=lambda pair: id(pair[1]) not in recorded_ids)
    for name, module in ordered:
        matrices = _matrices(module)
        there = id(module) in recorded_ids
        for parameter in matrices.values():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            moves = parameter.requires_grad and held(parameter)
            counts["matrices"] += parameter.numel()
            counts["trained"] += moves * parameter.numel()
            counts["recorded"] += there * parameter.numel()
            counts["recorded_trained"] += there * moves * parameter.numel()
        if matrices and not there:
            why, names = _left_out(name, module, reasons, id(module) in unasked_ids)
            groups.setdefault(why, []).extend(names)
    left_out = {why: tuple(names) for why, names in groups.items()}
    return Coverage(layers, left_out=left_out, without=_without(model, modules), **counts)


def say(line: str) -> None:
    """Show one line in any case: by the program's own logging where it is set up, otherwise on
    standard error, above any progress bar."""
    if LOGGER.hasHandlers():
        LOGGER.info(line)
    elif LOGGER.isEnabledFor(logging.INFO):
        bars = sys.modules.get("tqdm")
        if bars is not None:
            bars.tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Bytes in the unit that fits: "2.10 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 1e3:.2f} kB"


def some_of(names: Sequence[str]) -> str:
    """Names in a line: the first few, and how many more there are."""
    more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
    return ", ".join(names[:_NAMED]) + more


def _without(model: nn.Module, modules: Collection[nn.Module]) -> tuple[str, ...]:
    """Classes of the modules, in none that is recorded, whose parameters are no matrices."""
    recorded = {id(inner) for module in modules for inner in module.modules()}
    found = {
        type(module).__name__
        for module in model.modules()
        if id(module) not in recorded
        and any(True for _ in module.parameters(recurse=False))
        and all(parameter.dim() < 2 for parameter in module.parameters())
    }
    return tuple(sorted(found))


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters of two axes or more, without those of modules in it."""
    return {n: p for n, p in module.named_parameters(recurse=False) if p.dim() > 1}


def _left_out(
    name: str, module: nn.Module, reasons: Mapping[str, str], unasked: bool
) -> tuple[str, list[str]]:
    """Why a module's matrices are not recorded, and by what name that is said of them."""
    owner = f".{name}".partition(".parametrizations.")[0][1:]  # whose weight is computed from it
    if owner in reasons:
        return reasons[owner], [name]
    if unasked:
        return "not among layers=[...]; name it there", [name]
    kind = type(module).__name__
    if name and not any(module.children()):
        return (
            f"{kind} is of no kind that is recorded; where it is a product with a matrix, write "
            "it as nn.Linear"
        ), [name]
    # Of a module named as a whole the layers in it would seem to be left out, too.
    return (
        f"used by {kind} itself, in no layer of its own; what is only added, as a position "
        "embedding, has no keys; where it is a factor of a product, put it into an nn.Linear"
    ), [f"{name}.{each}" if name else each for each in _matrices(module)]
