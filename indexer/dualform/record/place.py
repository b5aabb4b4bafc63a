"""Is a layer still what was recorded? Its module, weight and bias can be exchanged while it trains.

`load_state_dict(assign=True)`, an assignment, a parametrisation or module surgery put something
else in a layer's place, and the optimizer may go on with what was there before.
"""

from __future__ import annotations

import torch
from torch import nn

from dualform.layers import ProductKind
from dualform.store.recording_format import LayerSpec


class LayerPlace:
    """Where a layer stands in the model, and what it holds.

    Args:
        root: The model, in which the layer's name leads to the module.
        spec: Of the layer.
        kind: Of the layer.
        module: The layer as recording begins.
    """

    def __init__(self, root: nn.Module, spec: LayerSpec, kind: ProductKind, module: nn.Module):
        self._root = root
        self._path = spec.name.split(".") if spec.name else []
        if kind.holder is not None:  # the module is several layers
            self._path = self._path[:-2]
        self._kind = kind
        self._module = module
        weight, _ = self.parameters()
        assert weight is not None
        self._dtype, self._shape = weight.dtype, weight.shape

    def parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The layer's weight and bias as they are: None where it has none of its own."""
        return self._kind.leaves(self._module)

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether keys and values of this weight are as long as those recorded so far."""
        return weight.shape == self._shape

    def change(self, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
        """What is no longer as it was: a reason for a mark; None if nothing is.

        Args:
            weight: The weight that was recorded so far.
            bias: The bias that was recorded so far.
        """
        held, held_bias = self.parameters()
        if held is None:
            return (
                "its weight is now computed from other parameters (parametrised after the "
                "recorder was made), so its gradient is not the sum of its rows"
            )
        if held is not weight:
            return f"its weight was replaced by another parameter; {_REMEDY}"
        if held.shape != self._shape:
            return f"its weight has the shape {list(held.shape)} now, not {list(self._shape)}"
        if held.dtype is not self._dtype:
            return f"its weight is {held.dtype} now, not {self._dtype}"
        if held_bias is not bias:
            what = (
                "its bias was removed"
                if held_bias is None
                else "it was given a bias"
                if bias is None
                else "its bias was replaced by another parameter"
            )
            return f"{what}; {_REMEDY}"
        if not self._in_model():
            return f"the model has another module in its place; {_REMEDY}"
        return None

    def _in_model(self) -> bool:
        found: nn.Module | None = self._root
        for name in self._path:
            found = None if found is None else found._modules.get(name)
        if found is self._module:
            return True
        return getattr(found, "_orig_mod", None) is self._module  # compiled since


_REMEDY = (
    "make a new recorder after such a change (load_state_dict(assign=True), an assignment), or "
    "copy values into the parameter that is there"
)
