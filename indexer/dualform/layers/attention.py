"""`nn.MultiheadAttention`: its two products, in_proj and out_proj, as two layers.

The module multiplies by both weights without calling a module, so its products are found in the
autograd graph between its output and its inputs. The layer `name` is in_proj: W [3 embed_dim,
embed_dim] gives q, k and v one below the other. Where query, key and value are one tensor, it is
the key and a row has values for all; otherwise each of them brings rows of its own, whose values
are zero for the units that it does not give. The layer `name.out_proj` has what the heads gave as
its keys. Slot is the example, whatever `batch_first` says, position the token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node

from dualform.layers.base import Forward, LayerKind, Product, ProductKind, Use

_MOST_NODES = 1000
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Inputs(NamedTuple):
    """Of a call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Inputs:
        return cls(*(args[i] if len(args) > i else kwargs[n] for i, n in enumerate(cls._fields)))

    @property
    def one(self) -> bool:
        """Query, key and value are the same tensor."""
        return self.query is self.key and self.key is self.value


class AttentionIn(ProductKind):
    """The product with `in_proj_weight`."""

    kind = "attention_in"
    example = "MultiheadAttention"
    weight_name = "in_proj_weight"
    bias_name = "in_proj_bias"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return _is_attention(module) and cls.why_not(module) is None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        if not isinstance(module, nn.MultiheadAttention):
            return None
        if not _is_attention(module):
            return (
                f"{type(module).__name__} has a forward of its own, so what it multiplies is not "
                "known; use nn.MultiheadAttention, or write attention with nn.Linear"
            )
        if module.in_proj_weight is None:
            return (
                "with kdim or vdim its weights for q, k and v are three, in one module; give key "
                "and value the width of the query, or project them with nn.Linear before"
            )
        return None

    @classmethod
    def inside(cls, module: nn.Module) -> Mapping[str, LayerKind]:
        return {"out_proj": AttentionOut(module)} if _is_attention(module) else {}

    def shape(self, module: nn.Module) -> tuple[int, int]:
        units, d = self.weight(module).shape
        return d, units

    def tensor(self, output: Any) -> torch.Tensor:
        return output[0]  # type: ignore[no-any-return]

    def uses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Sequence[Use]:
        if bias is not None:  # the check of the bias's gradient will tell
            return ()
        attention, inputs = _attention(module), _Inputs.of(args, kwargs)
        below = {tensor.grad_fn for tensor in inputs}
        found = []
        for node, units in _products(output.grad_fn, weight, below):
            start = 0 if units is None else units.start
            x = inputs[start // attention.embed_dim]
            found.append(Use(_by_example(attention, x), node, _ordered(x, attention), units))
        return found

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        attention, inputs = _attention(module), _Inputs.of(args, kwargs)
        if inputs.one:
            return _by_example(attention, inputs.query)
        distinct = {id(x): _by_example(attention, x).flatten(0, -2) for x in inputs}
        return torch.cat(list(distinct.values()))

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return next((node for node, _ in _products(output.grad_fn, weight, set())), None)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        attention = _attention(module)
        d = attention.embed_dim

        def project(inputs: _Inputs) -> _Tensors:
            if inputs.one:
                q, k, v = product(inputs.query).chunk(3, -1)
                return q, k, v
            q, k, v = (product(x)[..., i * d : (i + 1) * d] for i, x in enumerate(inputs))
            return q, k, v

        return _explicit(attention, project, attention.out_proj)


class AttentionOut(ProductKind):
    """The product with `out_proj.weight`, which `nn.MultiheadAttention` multiplies by itself.

    Args:
        host: The attention.
    """

    kind = "attention_out"
    example = "MultiheadAttention.out_proj"

    def __init__(self, host: nn.Module | None = None) -> None:
        self.host = host

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return False  # it is found inside its host

    def shape(self, module: nn.Module) -> tuple[int, int]:
        d_out, d_in = self.weight(module).shape
        return d_in, d_out

    def tensor(self, output: Any) -> torch.Tensor:
        return output[0]  # type: ignore[no-any-return]

    def uses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Sequence[Use]:
        node = None if bias is not None else self.node(output, weight)
        if node is None:
            return ()
        query = _Inputs.of(args, kwargs).query
        saved = getattr(node, "_saved_mat1", None)  # with a bias; without one, the first factor
        multiplied = node._saved_self if saved is None else saved  # type: ignore[attr-defined]
        order = _ordered(query, _attention(self.host))
        return (Use(order(multiplied), node, order),)

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """What the heads give, computed anew."""
        attention = _attention(self.host)
        found = _explicit(attention, _in_projection(attention), nn.Identity())(*args, **kwargs)[0]
        return _by_example(attention, found)

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return next((node for node, _ in _products(output.grad_fn, weight, set())), None)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            return product(input)

        return forward

    def host_forward(self) -> Forward:
        """The host's forward, calling `out_proj`."""
        attention = _attention(self.host)
        return _explicit(attention, _in_projection(attention), attention.out_proj)


def _is_attention(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def _attention(module: nn.Module | None) -> nn.MultiheadAttention:
    assert isinstance(module, nn.MultiheadAttention)
    return module


def _by_example(attention: nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """[batch, time, d] of what the attention takes or gives, or [time, d] without a batch."""
    return x if attention.batch_first or x.dim() < 3 else x.transpose(0, 1)


def _ordered(
    x: torch.Tensor, attention: nn.MultiheadAttention
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings rows in the order of the products, which is by time, into that of the keys.

    Args:
        x: The input that the rows belong to.
        attention: The module.
    """
    has_batch = x.dim() == 3
    batch, time = _by_example(attention, x).shape[:2] if has_batch else (0, len(x))

    def ordered(rows: torch.Tensor) -> torch.Tensor:
        if has_batch:
            return rows.reshape(time, batch, -1).transpose(0, 1)
        return rows.reshape(time, -1)

    return ordered


def _explicit(
    attention: nn.MultiheadAttention,
    project: Callable[[_Inputs], _Tensors],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Forward:
    """The module's forward with its products replaced.

    Args:
        attention: The module.
        project: Gives q, k and v [..., embed_dim] of query, key and value.
        finish: Takes what the heads give to the output.
    """

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        by_example = attention.batch_first and query.dim() == 3
        q, k, v = project(_Inputs(query, key, value))
        if by_example:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        # Multiplied once more, by ones, which changes nothing.
        ones = torch.eye(attention.embed_dim, dtype=q.dtype, device=q.device)
        found, weights = F.multi_head_attention_forward(
            q,
            k,
            v,
            attention.embed_dim,
            attention.num_heads,
            None,
            None,
            attention.bias_k,
            attention.bias_v,
            attention.add_zero_attn,
            attention.dropout,
            ones,
            None,
            training=attention.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=True,
            q_proj_weight=ones,
            k_proj_weight=ones,
            v_proj_weight=ones,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        found = finish(found)
        return (found.transpose(0, 1) if by_example else found), weights

    return forward


def _in_projection(attention: nn.MultiheadAttention) -> Callable[[_Inputs], _Tensors]:
    """The products with the module's own weights."""

    def project(inputs: _Inputs) -> _Tensors:
        whole, bias = attention.in_proj_weight, attention.in_proj_bias
        separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        weights = separate if whole is None else whole.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = map(F.linear, inputs, weights, biases)
        return q, k, v

    return project


_VIEWS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")


def _products(
    top: Node | None, parameter: torch.Tensor, below: set[Node | None]
) -> Iterator[tuple[Node, slice | None]]:
    """The nodes that multiply by a parameter or by some of its rows, the nearest first.

    Args:
        top: Where to begin.
        parameter: The weight.
        below: Where to go no further: the nodes of the inputs.

    Yields:
        A node, and the rows of the weight that it multiplies by; None for all.
    """
    waiting, seen = deque([top]), {top}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in below:
            continue
        for child, number in node.next_functions:
            reached, units = _rows_of(child, number, parameter)
            if reached:
                yield node, units
            elif child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _rows_of(node: Node | None, number: int, parameter: torch.Tensor) -> tuple[bool, slice | None]:
    """Whether a node's output is a parameter, or which of its rows."""
    units: slice | None = None
    while node is not None:
        name = type(node).__name__
        if name in ("SplitBackward0", "SplitWithSizesBackward0"):
            units = _part(node, number)
        elif name not in _VIEWS:
            break
        node, number = node.next_functions[0]
    return getattr(node, "variable", None) is parameter, units


def _part(node: Any, number: int) -> slice:
    """The rows that a split gave as its output of this number."""
    if type(node).__name__ == "SplitBackward0":
        size = int(node._saved_split_size)
        return slice(number * size, (number + 1) * size)
    sizes = [int(size) for size in node._saved_split_sizes]
    start = sum(sizes[:number])
    return slice(start, start + sizes[number])
