"""Which layers of a model are recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from dualform.record.coverage import Coverage, cover
from dualform.record.errors import LayerSelectionError
from dualform.record.layers import LSTM, LayerKind
from dualform.store.recording_format import LayerSpec


@dataclass(frozen=True)
class SelectedLayer:
    """A layer to record: what it is called, of which kind, and the module itself.

    Attributes:
        root: The model in which the spec's name leads to the module.
        parts: Of an LSTM: its products with x and with h; the kind is theirs.
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
    kinds = {name: kind for name, m in model.named_modules() if (kind := LayerKind.of(m))}
    modules = dict(model.named_modules())
    owners = _owners(model)
    refusals = {
        name: _refusal(name, kind, modules[name], owners, held) for name, kind in kinds.items()
    }
    lstms = {name: m for name, m in modules.items() if isinstance(m, LSTM)}
    refusals = _with_lstms(lstms, refusals)
    unsupported = {name: why for name, m in modules.items() if (why := _why_not(m))}
    if patterns is None:
        chosen = [name for name, refusal in refusals.items() if refusal is None]
        if not chosen:
            raise LayerSelectionError(
                _nothing("No layer can be recorded", modules, {**refusals, **unsupported})
            )
    else:
        chosen = _match(patterns, modules, refusals, unsupported)

    def linear(name: str) -> SelectedLayer:
        spec = _spec(name, kinds[name], modules[name])
        return SelectedLayer(spec, kinds[name], modules[name], model)

    layers = [
        _lstm(name, lstms[name], *map(linear, _part_names(name))) if name in lstms else linear(name)
        for name in chosen
    ]
    parts = [part.module for layer in layers for part in layer.parts or (layer,)]
    why_not = {name: why for name, why in {**refusals, **unsupported}.items() if why is not None}
    return Selection(layers, cover(model, parts, why_not, patterns is not None, len(layers)))


def _match(
    patterns: Sequence[str],
    modules: dict[str, nn.Module],
    refusals: dict[str, str | None],
    unsupported: dict[str, str],
) -> list[str]:
    if isinstance(patterns, str):
        patterns = [patterns]
    wanted: set[str] = set()
    for pattern in patterns:
        matched = [n for n in modules if n == pattern or fnmatch.fnmatchcase(n, pattern)]
        supported = [name for name in matched if name in refusals]
        if not supported and len(matched) == 1 and matched[0] in unsupported:
            raise LayerSelectionError(
                f"layers={list(patterns)}: layer {matched[0]!r} cannot be recorded: "
                f"{unsupported[matched[0]]}"
            )
        if not supported:
            what = "nothing" if not matched else f"only unsupported modules ({matched[0]!r}, ...)"
            raise LayerSelectionError(
                _nothing(f"layers={list(patterns)}: {pattern!r} matches {what}", modules, refusals)
            )
        for name in supported:
            # Named outright, a tied layer is recorded as it is; the check of every step says
            # whether its rows explain its gradient.
            refusal = refusals[name]
            if refusal is not None and not refusal.startswith("tied"):
                raise LayerSelectionError(
                    f"layers={list(patterns)}: layer {name!r} cannot be recorded: {refusal}"
                )
        wanted.update(supported)
    return [name for name in refusals if name in wanted]


def _refusal(
    name: str,
    kind: LayerKind,
    module: nn.Module,
    owners: dict[int, list[str]],
    held: Callable[[torch.Tensor], bool],
) -> str | None:
    """Why a layer is not recorded by default; None if it is."""
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
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return (
            "nn.MultiheadAttention multiplies by its weight without calling it, "
            "so there are no rows to see; write attention with nn.Linear of your own"
        )
    return None


def _part_names(name: str) -> tuple[str, str]:
    """Of an LSTM's products with x and with h."""
    prefix = f"{name}." if name else ""
    return f"{prefix}ih", f"{prefix}hh"


def _with_lstms(
    lstms: Mapping[str, nn.Module], refusals: dict[str, str | None]
) -> dict[str, str | None]:
    """Each LSTM in the place of its two products, which are recorded as one layer."""
    whole: dict[str, str | None] = {}
    parts = {part: name for name in lstms for part in _part_names(name)}
    for name, refusal in refusals.items():
        if name not in parts:
            whole[name] = refusal
            continue
        lstm = parts[name]
        before = whole.get(lstm)
        why = None if refusal is None else f"of its part {name.rpartition('.')[2]}, {refusal}"
        whole[lstm] = before or why
    return whole


def _why_not(module: nn.Module) -> str | None:
    """Why a module that has weights of its own is no layer for the recorder."""
    if isinstance(module, nn.LSTM):
        return (
            "nn.LSTM runs a fused kernel that no hook sees into; put "
            "dualform.record.LSTM.from_torch(lstm) in its place, which gives the same output"
        )
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return (
            f"{type(module).__name__} runs a fused kernel that no hook sees into; "
            "dualform.record.LSTM is recorded"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return (
            "an embedding looks its row up by a token's number: its key would be one-hot, and its "
            "attention weight whether two tokens are the same; nothing is missed"
        )
    return None


def _lstm(name: str, module: LSTM, ih: SelectedLayer, hh: SelectedLayer) -> SelectedLayer:
    prefix = f"{name}." if name else ""
    spec = LayerSpec(
        name=name,
        kind="lstm",
        d_in=hh.spec.d_in + ih.spec.d_in,
        d_out=ih.spec.d_out,
        weight=f"{prefix}weight",
        bias=None if ih.spec.bias is None else f"{prefix}bias",
        dtype=ih.spec.dtype,
    )
    return SelectedLayer(spec, ih.kind, module, ih.root, (ih, hh))


def _owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
    return owners


def _nothing(problem: str, modules: dict[str, nn.Module], refusals: dict[str, str | None]) -> str:
    available = [name for name, refusal in refusals.items() if refusal is None]
    lines = [f"{problem}. Layers that can be recorded: {available or 'none'}."]
    lines += [f"Not {name!r}: {why}." for name, why in list(refusals.items())[:5] if why]
    if not refusals:
        kinds = sorted({kind.module_type.__name__ for kind in LayerKind.registry})
        lines.append(f"The model has no {' or '.join(kinds)} among its {len(modules)} modules.")
    return " ".join(lines)


def _spec(name: str, kind: LayerKind, module: nn.Module) -> LayerSpec:
    d_in, d_out = kind.shape(module)
    prefix = f"{name}." if name else ""
    return LayerSpec(
        name=name,
        kind=kind.kind,
        d_in=d_in,
        d_out=d_out,
        weight=f"{prefix}weight",
        bias=None if kind.bias(module) is None else f"{prefix}bias",
        dtype=str(kind.weight(module).dtype).removeprefix("torch."),
    )
