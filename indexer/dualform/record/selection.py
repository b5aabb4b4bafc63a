"""Which layers of a model are recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from dualform.layers import LayerKind, ProductKind, bare, layers_of, why_not
from dualform.layers.base import part_name
from dualform.layers.embedding import Embedding
from dualform.layers.linear import Linear
from dualform.record.coverage import Coverage, cover
from dualform.record.errors import LayerSelectionError
from dualform.store.recording_format import LayerSpec


class Tied(NamedTuple):
    """Another module with a layer's weight, whose rows are the layer's too."""

    name: str
    kind: ProductKind
    module: nn.Module


@dataclass(frozen=True)
class SelectedLayer:
    """A layer to record: what it is called, of which kind, and the module itself.

    Attributes:
        root: The model in which the spec's name leads to the module.
        parts: Of a joined kind: its products, each a layer of its own kind.
        tied: The other modules that use its weight.
    """

    spec: LayerSpec
    kind: LayerKind
    module: nn.Module
    root: nn.Module
    parts: tuple[SelectedLayer, ...] = ()
    tied: tuple[Tied, ...] = ()

    def modules(self) -> list[nn.Module]:
        """Those whose weights it records."""
        parts = [part.module for part in self.parts] or [self.module]
        return parts + [tied.module for tied in self.tied]


_NOT_HELD = {
    True: "its weight is not among the optimizer's parameters; give it to the optimizer",
    False: "frozen: its weight requires no gradient and the optimizer does not hold it, so "
    "training leaves it as it is; to record it, let it train",
}
"""Why a layer is not recorded whose weight the optimizer lacks, by whether it is to be trained."""


@dataclass(frozen=True)
class Selection:
    """The layers to record, in the model's order, and what that leaves out."""

    layers: list[SelectedLayer]
    coverage: Coverage


def select_layers(
    model: nn.Module, patterns: Sequence[str] | None, held: Callable[[torch.Tensor], bool]
) -> Selection:
    """Choose the layers.

    Args:
        model: The whole model.
        patterns: Names or glob patterns as in `model.named_modules()`; what is a name means that
            module alone, even where it is a pattern too. None for every supported layer whose
            weight is a leaf that the optimizer holds, neither parametrised nor tied.
        held: Whether the optimizer holds a parameter.

    Raises:
        LayerSelectionError: A pattern matches nothing, or something that cannot be recorded.
    """
    model = bare(model)
    modules = dict(model.named_modules())
    kinds, owners = layers_of(model), _owners(model)
    modules.update(_holders(kinds))
    ties = _ties(modules, kinds, owners)
    stands_for = {item.name: name for name, tied in ties.items() for item in tied}
    alone = _alone(owners, {*ties, *stands_for})
    refusals = {
        name: _refusal(name, kind, modules[name], alone, held) for name, kind in kinds.items()
    }
    unsupported = {name: why for name, m in modules.items() if (why := why_not(m))}
    if patterns is None:
        matched = _all(modules, refusals, unsupported)
    else:
        matched = _match(patterns, modules, refusals, unsupported)
    wanted = {stands_for.get(name, name) for name in matched}
    layers = [
        _selected(name, kinds[name], modules[name], model, ties.get(name, ()))
        for name in kinds  # in the model's order
        if name in wanted
    ]
    reasons = {name: why for name, why in {**refusals, **unsupported}.items() if why is not None}
    recorded = [module for layer in layers for module in layer.modules()]
    unasked = [] if patterns is None else _all_modules(kinds, modules)
    return Selection(layers, cover(model, recorded, reasons, unasked, len(layers), held))


def _holders(kinds: Mapping[str, LayerKind]) -> dict[str, nn.Module]:
    """Of layers that share a module, that module."""
    return {name: kind.holder for name, kind in kinds.items() if kind.holder is not None}


def _all_modules(
    kinds: Mapping[str, LayerKind], modules: Mapping[str, nn.Module]
) -> list[nn.Module]:
    """Those that are layers, or parts of some."""
    names = [part_name(name, part) for name, kind in kinds.items() for part in ("", *kind.parts)]
    return [modules[name.removesuffix(".")] for name in names]


def _all(
    modules: dict[str, nn.Module], refusals: dict[str, str | None], unsupported: dict[str, str]
) -> list[str]:
    found = [name for name, refusal in refusals.items() if refusal is None]
    if not found:
        raise LayerSelectionError(
            _nothing("No layer can be recorded", modules, {**refusals, **unsupported})
        )
    return found


def _match(
    patterns: Sequence[str],
    modules: dict[str, nn.Module],
    refusals: dict[str, str | None],
    unsupported: dict[str, str],
) -> list[str]:
    if isinstance(patterns, str):
        patterns = [patterns]
    given = f"layers={list(patterns)}"
    if not patterns:
        raise LayerSelectionError(f"{given} names none; None takes all there are")
    wanted: set[str] = set()
    for pattern in patterns:
        # What is a name means it alone, also where it is a pattern: [a], or *.
        matched = [n for n in modules if fnmatch.fnmatchcase(n, pattern)]
        matched = [pattern] if pattern in modules else matched
        supported = [name for name in matched if name in refusals]
        if not supported:
            raise LayerSelectionError(
                _matches_nothing(given, pattern, matched, modules, refusals, unsupported)
            )
        for name in supported:
            # Named outright, a tied layer is recorded as it is; the check of every step says
            # whether its rows explain its gradient.
            refusal = refusals[name]
            if refusal is not None and not refusal.startswith("tied"):
                raise LayerSelectionError(f"{given}: layer {name!r} cannot be recorded: {refusal}")
        wanted.update(supported)
    return [name for name in refusals if name in wanted]


def _matches_nothing(
    given: str,
    pattern: str,
    matched: Sequence[str],
    modules: dict[str, nn.Module],
    refusals: dict[str, str | None],
    unsupported: dict[str, str],
) -> str:
    """What to say of a pattern that names no layer of a kind that is recorded."""
    if len(matched) == 1 and matched[0] in unsupported:
        return f"{given}: layer {matched[0]!r} cannot be recorded: {unsupported[matched[0]]}"
    what = "nothing" if not matched else f"only unsupported modules ({matched[0]!r}, ...)"
    return _nothing(f"{given}: {pattern!r} matches {what}", modules, refusals)


def _refusal(
    name: str,
    kind: LayerKind,
    module: nn.Module,
    owners: Mapping[int, Sequence[tuple[str, str]]],
    held: Callable[[torch.Tensor], bool],
) -> str | None:
    """Why a layer is not recorded by default; None if it is, be it with one that it is tied to,
    whose weight is then not among those with owners."""
    for part, (part_kind, submodule) in _parts(kind, module).items():
        if part_kind is None:
            return f"its part {part}, {type(submodule).__name__}, is of no kind that is recorded"
        refusal = _refusal(part_name(name, part), part_kind, submodule, owners, held)
        if refusal is not None:
            return f"of its part {part}, {refusal}"
    if not isinstance(kind, ProductKind):
        return kind.refusal(module)
    if parametrize.is_parametrized(module) or not isinstance(kind.weight(module), nn.Parameter):
        return (
            "its weight is computed from other parameters (parametrised), "
            "so its gradient is not the sum of its rows; remove the parametrisation first"
        )
    weight = kind.weight(module)
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight has no shape yet; run one forward pass before making the recorder"
    if weight.numel() == 0:
        return f"its weight is empty, {list(weight.shape)}: there is nothing to record"
    if weight.is_complex():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}: only real ones can be"
    if not held(weight):
        return _NOT_HELD[weight.requires_grad]
    # Of a module that is several layers, the name without the weight's and the piece's.
    home = name if kind.holder is None else ".".join(name.split(".")[:-2])
    others = [part_name(*user) for user in owners.get(id(weight), ()) if user[0] != home]
    if others:
        return (
            f"tied: its weight is also {', '.join(others[:3])}; rows of both add up only where all "
            "are nn.Linear without a bias or nn.Embedding: leave out the bias, untie them, in "
            "transformers by tie_word_embeddings=False, or name it in layers=[...] to record its "
            "rows alone"
        )
    return kind.refusal(module)


def _parts(kind: LayerKind, module: nn.Module) -> dict[str, tuple[LayerKind | None, nn.Module]]:
    """The products that a layer of a joined kind consists of, by their names in it."""
    parts = {name: module.get_submodule(name) for name in kind.parts}
    return {name: (LayerKind.of(part), part) for name, part in parts.items()}


def _owners(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """Of every parameter the modules that hold it, and what they call it."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, attribute))
    return owners


def _alone(
    owners: Mapping[int, Sequence[tuple[str, str]]], tied: Container[str]
) -> dict[int, Sequence[tuple[str, str]]]:
    """The parameters that no recorded tie is of, and who holds them."""
    return {id: users for id, users in owners.items() if users[0][0] not in tied}


def _ties(
    modules: Mapping[str, nn.Module],
    kinds: Mapping[str, LayerKind],
    owners: Mapping[int, Sequence[tuple[str, str]]],
) -> dict[str, tuple[Tied, ...]]:
    """The layers whose weight others use too, such that rows of all add up: linear layers without a
    bias and embeddings. The first linear layer stands for all, or the first embedding."""
    found: dict[str, tuple[Tied, ...]] = {}
    for holders in owners.values():
        if len(holders) < 2:
            continue
        plain = [
            Tied(name, kind, modules[name])
            for name, _ in holders
            if isinstance(kind := kinds.get(name), (Linear, Embedding))
            and kind.bias(modules[name]) is None
        ]
        if len(plain) < len(holders):
            continue
        first = next((user for user in plain if not user.kind.one_hot), plain[0])
        found[first.name] = tuple(user for user in plain if user is not first)
    return found


def _nothing(problem: str, modules: dict[str, nn.Module], refusals: dict[str, str | None]) -> str:
    available = [name for name, refusal in refusals.items() if refusal is None]
    lines = [f"{problem}. Layers that can be recorded: {available or 'none'}."]
    lines += [f"Not {name!r}: {why}." for name, why in list(refusals.items())[:5] if why]
    if not refusals:
        kinds = [kind.example for kind in LayerKind.registry]
        lines.append(f"The model has no {' or '.join(kinds)} among its {len(modules)} modules.")
    return " ".join(lines)


def _selected(
    name: str, kind: LayerKind, module: nn.Module, root: nn.Module, tied: Sequence[Tied] = ()
) -> SelectedLayer:
    d_in, d_out = kind.shape(module)
    parts = tuple(
        _selected(part_name(name, part), part_kind, submodule, root)
        for part, (part_kind, submodule) in _parts(kind, module).items()
        if part_kind is not None
    )
    spec = LayerSpec(
        name=name,
        kind=kind.kind,
        d_in=d_in,
        d_out=d_out,
        weight=part_name(name, kind.weight_name),
        bias=None if kind.bias(module) is None else part_name(name, kind.bias_name),
        dtype=str(kind.matrix(module).dtype).removeprefix("torch."),
    )
    return SelectedLayer(spec, kind, module, root, parts, tuple(tied))
