"""Why a layer is inexact, in words: what marks and refusals say."""

from __future__ import annotations

import torch

from dualform.record.buffers import kept_as
from dualform.record.capture import LayerCapture

WEIGHTS_CHANGED = "weights changed other than by the recorded optimizer steps"

FOREIGN_GRADIENT = """layer {name!r} got a gradient, but none of its own passes brought it.
Likely causes:
- the model uses the weight without calling the layer: F.linear(x, layer.weight), or
  nn.MultiheadAttention, which never calls its out_proj;
- a function around the model was compiled and had run before the recorder was made: make the
  recorder first, or call torch._dynamo.reset() before it, which forgets compiled code;
- the gradient was assigned by hand, or its backward ran before the recorder was made.
Leave the layer out with Recorder(..., layers=[...]), or call it as a module."""


def rounded_reason(recorded: str, weight: torch.dtype) -> str:
    """Of weights that are not float32: as the recording calls their type, and the type."""
    why = f"{recorded} weights, but keys and values are kept as float32"
    if kept_as(weight) is not torch.float32:
        why = f"{recorded} weights, which every step rounds; keys and values are as they were"
    return f"rounded: {why}"


def optimizer_reason(name: str, why_not: str | None) -> str:
    """Of an optimizer whose steps are not followed."""
    return f"optimizer {name}: {why_not or 'its outputs are not answered yet'}; weights stay exact"


def axes_reason(name: str) -> str:
    """Of an optimizer whose steps depend on a weight's axes, and a layer with others."""
    return (
        f"{name} steps by the axes of a weight, and this layer's are not those of its matrix; "
        "weights stay exact"
    )


def fault_reason(fault: str, capture: LayerCapture, kept: bool) -> str:
    """Of a gradient that is not the rows'.

    Args:
        fault: As in `Verdict`.
        capture: What the layer's hooks saw at the step.
        kept: Rows reach the step.
    """
    if fault == "not finite":
        return "the gradient is not finite"
    if fault == "clipped":
        return "the gradient was clipped by value, which no factor describes"
    if fault == "edited":
        return "the gradient was changed between backward and step other than by one factor"
    if capture.autocast:
        return "reduced precision (autocast): the gradient was computed from rounded numbers"
    if fault == "rounded":
        return (
            "float32 lost too much of the gradient: so many rows of a step are all but equal "
            "(padding, or a constant input); smaller batches lose less"
        )
    if capture.double_backward:
        return "double backward (gradient penalty): its part of the gradient is no row"
    if capture.late:
        return "a backward ran again, after a step, through a forward of an earlier step"
    if capture.alone and capture.weight.grad is not None:
        return "the weight was frozen in part of the step: rows of it reached the bias alone"
    if capture.carried or not kept:
        return "the gradient was carried over a step without zeroing, or assigned by hand"
    return (
        "the rows do not add up to the gradient; is the weight used elsewhere too "
        "(tied, F.linear), or changed by a hook?"
    )
