"""Which of an index's layers a model has, and whether it is the model that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import meant, patterns_of
from dualform.client._info import IndexInfo, LayerInfo
from dualform.client.errors import FailedPreconditionError, InvalidArgumentError, bad_answer

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind


def chosen_layers(
    model: torch.nn.Module, info: IndexInfo, layers: str | Sequence[str] | None
) -> dict[str, LayerKind]:
    """The kinds of the layers to replace, once each is the index's in name, kind and shape."""
    from dualform.layers import layers_of

    kinds = layers_of(model)
    modules = dict(model.named_modules())
    modules.update({name: k.holder for name, k in kinds.items() if k.holder is not None})
    if layers is None:
        names = [name for name in info.layers if name in modules]
        if not names:
            raise InvalidArgumentError(
                f"the model has none of the index's layers ({listed(info.layers)}): is it the "
                "one that was recorded?",
                field="model",
            )
    else:
        names = layers_asked(info, layers)
    return {name: _checked(modules.get(name), info.layers[name], kinds) for name in names}


def layers_asked(info: IndexInfo, layers: str | Sequence[str] | None) -> list[str]:
    """The index's layers of these names or patterns; without any, those that have values."""
    if layers is None:
        names = [name for name, layer in info.layers.items() if layer.values]
        if not names:
            raise FailedPreconditionError(
                "no layer of the index has values; record with values=True and build with --values",
                reason="NO_VALUES",
            )
        return names
    patterns = patterns_of(layers)
    if not patterns:
        raise InvalidArgumentError("layers=[] names none; None takes all there are", field="layers")
    return _matching(info, patterns)


def _matching(info: IndexInfo, patterns: Sequence[str]) -> list[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        found = meant(pattern, info.layers)
        if not found:
            raise InvalidArgumentError(
                f"layers: {pattern!r} matches no layer of the index; there are: "
                f"{listed(info.layers)}",
                field="layers",
            )
        chosen.update(found)
    return [name for name in info.layers if name in chosen]


def _checked(
    module: torch.nn.Module | None, info: LayerInfo, kinds: Mapping[str, LayerKind]
) -> LayerKind:
    if module is None:
        raise InvalidArgumentError(
            f"the model has no layer {info.name!r}; its linear layers are: {listed(kinds)}",
            field="layers",
        )
    kind = kinds.get(info.name)
    if kind is None or kind.kind != info.kind:
        raise InvalidArgumentError(
            f"layer {info.name!r} is {info.kind} in the index and {type(module).__name__} in the "
            f"model; its linear layers are: {listed(kinds)}",
            field="layers",
        )
    of_model = (*kind.shape(module), kind.bias(module) is not None)
    of_index = (info.d_in, info.d_out, info.bias)
    if of_model != of_index:
        raise InvalidArgumentError(
            f"layer {info.name!r} is {_shape(*of_index)} in the index and {_shape(*of_model)} in "
            "the model: is it the one that was recorded?",
            field="layers",
        )
    return kind


def check_exact(info: LayerInfo, end: int | None) -> None:
    if not info.values:
        raise FailedPreconditionError(
            f"layer {info.name!r} was recorded or indexed without values, so it has no dual form",
            reason="NO_VALUES",
            field="layers",
        )
    for mark in info.inexact:
        if end is not None and mark.from_step < end:
            raise FailedPreconditionError(
                f"the dual form of layer {info.name!r} is not exact from step {mark.from_step} on: "
                f"{mark.reason}; leave the layer out of layers=, or ask with at_step <= "
                f"{mark.from_step}",
                reason="INEXACT",
                field="layers",
            )


def probe_of(
    kind: LayerKind, layer: torch.nn.Module
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """A random vector, float32 [1, d_in], and what the model's layer makes of it, [1, d_out]: by it
    two weights are told apart."""
    import torch

    weight, bias = kind.matrix(layer).detach(), kind.bias(layer)
    probe = np.random.default_rng(0).standard_normal((1, weight.shape[1])).astype(np.float32)
    of_model = torch.nn.functional.linear(
        torch.from_numpy(probe).double(),
        weight.cpu().double(),
        None if bias is None else bias.detach().cpu().double(),
    )
    return probe, of_model.numpy()


def check_width(name: str, d_out: int, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`outputs`, if they are as wide as the layer's.

    Raises:
        InternalError: They are not.
    """
    if outputs.shape[-1] != d_out:
        raise bad_answer(
            f"outputs of layer {name!r} have {outputs.shape[-1]} units, the layer {d_out}"
        )
    return outputs


def _shape(d_in: int, d_out: int, bias: bool) -> str:
    return f"{d_in} -> {d_out} {'with' if bias else 'without'} bias"


def listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
