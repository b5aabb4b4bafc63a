"""Which layers of a model are recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from dualform.layers import LayerKind, ProductKind, layers_of, why_not
from dualform.layers.base import part_name
from dualform.record.coverage import Coverage, cover
from dualform.record.errors import LayerSelectionError
from dualform.store.recording_format import LayerSpec


@dataclass(frozen=True)
class SelectedLayer:
    """A layer to record: what it is called, of which kind, and the module itself.

    Attributes:
        root: The model in which the spec's name leads to the module.
        parts: Of a joined kind: its products, each a layer of its own kind.
    """

    spec: LayerSpec
    kind: LayerKind
    module: nn.Module
    root: nn.Module
    parts: tuple[SelectedLayer, ...] = ()


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
        patterns: Names or glob patterns as in `model.named_modules()`; None for every supported
            layer whose weight is a leaf that the optimizer holds, neither parametrised nor tied.
        held: Whether the optimizer holds a parameter.

    Raises:
        LayerSelectionError: A pattern matches nothing, or something that cannot be recorded.
    """
    model = getattr(model, "_orig_mod", model)  # compiled: the layers keep the names they had
    modules = dict(model.named_modules())
    kinds, owners = layers_of(model), _owners(model)
    refusals = {
        name: _refusal(name, kind, modules[name], owners, held) for name, kind in kinds.items()
    }
    unsupported = {name: why for name, m in modules.items() if (why := why_not(m))}
    if patterns is None:
        chosen = [name for name, refusal in refusals.items() if refusal is None]
        if not chosen:
            raise LayerSelectionError(
                _nothing("No layer can be recorded", modules, {**refusals, **unsupported})
            )
    else:
        chosen = _match(patterns, modules, refusals, unsupported)

    layers = [_selected(name, kinds[name], modules[name], model) for name in chosen]
    parts = [part.module for layer in layers for part in layer.parts or (layer,)]
    reasons = {name: why for name, why in {**refusals, **unsupported}.items() if why is not None}
    return Selection(layers, cover(model, parts, reasons, patterns is not None, len(layers)))


def _match(
    patterns: Sequence[str],
    modules: dict[str, nn.Module],
    refusals: dict[str, str | None],
    unsupported: dict[str, str],
) -> list[str]:
    if isinstance(patterns, str):
        patterns = [patterns]
    given = f"layers={list(patterns)}"
    wanted: set[str] = set()
    for pattern in patterns:
        matched = [n for n in modules if n == pattern or fnmatch.fnmatchcase(n, pattern)]
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
    owners: dict[int, list[str]],
    held: Callable[[torch.Tensor], bool],
) -> str | None:
    """Why a layer is not recorded by default; None if it is."""
    for part, (part_kind, submodule) in _parts(kind, module).items():
        if part_kind is None:
            return f"its part {part} is a {type(submodule).__name__}, of no kind that is recorded"
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
    if weight.is_complex():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}: only real ones can be"
    if not held(weight):
        return "its weight is not among the optimizer's parameters; give it to the optimizer"
    others = [owner for owner in owners[id(weight)] if owner != f"{name}.weight".lstrip(".")]
    if others:
        return (
            f"tied: its weight is also {', '.join(others[:3])}; name it in layers=[...] to record "
            "it all the same"
        )
    return kind.refusal(module)


def _parts(kind: LayerKind, module: nn.Module) -> dict[str, tuple[LayerKind | None, nn.Module]]:
    """The products that a layer of a joined kind consists of, by their names in it."""
    parts = {name: module.get_submodule(name) for name in kind.parts}
    return {name: (LayerKind.of(part), part) for name, part in parts.items()}


def _owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(
                f"{name}.{attribute}" if name else attribute
            )
    return owners


def _nothing(problem: str, modules: dict[str, nn.Module], refusals: dict[str, str | None]) -> str:
    available = [name for name, refusal in refusals.items() if refusal is None]
    lines = [f"{problem}. Layers that can be recorded: {available or 'none'}."]
    lines += [f"Not {name!r}: {why}." for name, why in list(refusals.items())[:5] if why]
    if not refusals:
        kinds = [kind.example for kind in LayerKind.registry]
        lines.append(f"The model has no {' or '.join(kinds)} among its {len(modules)} modules.")
    return " ".join(lines)


def _selected(name: str, kind: LayerKind, module: nn.Module, root: nn.Module) -> SelectedLayer:
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
        weight=part_name(name, "weight"),
        bias=None if kind.bias(module) is None else part_name(name, "bias"),
        dtype=str(kind.matrix(module).dtype).removeprefix("torch."),
    )
    return SelectedLayer(spec, kind, module, root, parts)
