"""Capturing rows: hooks on one layer, and which rows belong to the coming step.

Keys are copied in a forward hook, values in a pre-hook on the node that multiplies by the weight.
A row is committed when its backward has accumulated into the weight's gradient (the bias's while
the weight is frozen), and dropped when that gradient is found zeroed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dualform.layers import ProductKind, ShapeError
from dualform.layers.base import Use
from dualform.record.buffers import PLACES, kept_as
from dualform.record.compiled import outside_graphs
from dualform.record.errors import CaptureError
from dualform.record.inputs import keys_of
from dualform.record.passes import USE, LookedUp, Pass, Watched, watched_modules
from dualform.record.place import LayerPlace
from dualform.record.selection import Tied
from dualform.record.tape import Tape
from dualform.record.watch import GradientWatch
from dualform.store.recording_format import LayerSpec


class LayerCapture:
    """The hooks on one layer.

    Attributes:
        ever: Rows were committed at some step.
        autocast: A pass of this step ran under autocast.
        double_backward: A backward of this step was itself differentiated.
        carried: A backward of this step found a gradient that no row of this step explains.
        alone: Rows of this step reached the bias, but not the weight, which was frozen in their
            forward or backward.
        late: A backward came, in a later step, through a forward whose key is gone.
        replaced: The layer's weight or bias was found to be another parameter: what was replaced.
    """

    def __init__(
        self,
        spec: LayerSpec,
        kind: ProductKind,
        module: nn.Module,
        tied: Sequence[Tied],
        place: LayerPlace,
        tape: Tape,
        watch: GradientWatch,
        bias_watch: GradientWatch | None,
        held: Callable[[torch.Tensor], bool],
    ) -> None:
        self.spec = spec
        self.module = module
        self.place = place
        self.weight = kind.weight(module)
        self.bias = kind.bias(module)
        self.replaced: str | None = None
        self._held = held
        self._passes: dict[int, Pass] = {}
        self.ever = False
        self._tape = tape
        self._watched = watched_modules(spec.name, kind, module, tied)
        self._watch = watch
        self._bias_watch = bias_watch  # where a rank's part of its gradient is looked at
        # Backwards of several threads may run through one graph: none may find the gradient zeroed,
        # and drop what another commits meanwhile.
        self._lock = threading.Lock()
        self._frozen = False  # in the forward or the backward of the value copied last
        self._handles: list[Any] = []
        self._on_weight: Any = None
        self._on_bias: Any = None
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._passes.clear()
        self._for_each_watch(lambda watch, _: watch.begin(step=True))
        self.autocast = self.double_backward = self.carried = self.late = self.alone = False

    def attach(self) -> None:
        """Hook the module; the weight follows as soon as it requires gradients."""
        for watched in self._watched:
            hook = _ForwardHook(self, watched)
            module = watched.kind.host or watched.module
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        if self._tape.ranked:
            # Even where this rank never runs the layer, others may.
            self._attach_to(self.weight.requires_grad)

    def averaged(self) -> None:
        """A backward has ended, and gradients were averaged over ranks."""
        self._for_each_watch(lambda watch, parameter: watch.averaged(parameter.grad))

    def _for_each_watch(self, do: Callable[[GradientWatch, torch.Tensor], None]) -> None:
        if not self._tape.ranked:
            return
        do(self._watch, self.weight)
        if self._bias_watch is not None and self.bias is not None:
            do(self._bias_watch, self.bias)

    def detach(self) -> None:
        """Remove every hook, and let go of all rows."""
        for handle in (*self._handles, self._on_weight, self._on_bias):
            if handle is not None:
                handle.remove()
        self._handles.clear()
        self._on_weight = self._on_bias = None
        self._passes.clear()

    def follow(self) -> str | None:
        """Look at what the layer's weight and bias are, and go on with those.

        Returns:
            What was replaced since the last call, a reason for a mark; None if nothing was.
        """
        reason = self.replaced or self.place.change(self.weight, self.bias)
        self.replaced = None
        if reason is not None:
            self._rebind(*self.place.parameters())
        return reason

    def _meet(self, weight: torch.Tensor | None) -> None:
        """A forward ran with another weight than before. If the optimizer holds it, it is the
        layer's from now on; otherwise it may be there for this call alone (functional_call), and
        its gradient reaches no step.
        """
        if isinstance(weight, nn.Parameter) and self.place.fits(weight) and self._held(weight):
            self.replaced = self.place.change(self.weight, self.bias)
            self._rebind(*self.place.parameters())

    def _rebind(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        if bias is not self.bias:
            self.bias = bias
            if self._on_bias is not None:
                self._on_bias.remove()
            self._on_bias = None
        if weight is not None and weight is not self.weight:
            self.drop()  # rows of a weight that is not the layer's any more
            self.weight = weight
            self._watch.forget()
            if self._on_weight is not None:
                self._on_weight.remove()
            self._on_weight = None

    def committed(self) -> list[Pass]:
        """The passes committed for the coming step, in forward order."""
        return [self._passes[number] for number in sorted(self._passes)]

    def drop(self) -> None:
        """The gradient was zeroed: the rows committed so far do not reach the step."""
        for item in self._passes.values():
            item.value = None
        self._passes.clear()
        self._for_each_watch(lambda watch, _: watch.begin(step=False))
        self.alone = False

    def forward(
        self, watched: Watched, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """The forward hook: copy the keys and hook the nodes that multiply by the weight."""
        output = watched.kind.tensor(output)
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        held = self.place.parameters()[0]
        if held is not self.weight:
            self._meet(held)
        weight = self.weight
        if watched is not self._watched[0] and watched.held is not weight:
            return  # it is tied no more
        trained = weight.requires_grad
        if not trained and not self._trains_bias():
            return
        try:
            uses = watched.kind.uses(
                watched.module, args, kwargs, output, weight, None if trained else self.bias
            )
        except ShapeError as wrong:
            raise CaptureError(
                f"layer {watched.name!r} ({type(watched.module).__name__}): {wrong}, so its key is "
                "unknown; leave it out with Recorder(..., layers=[...])"
            ) from None
        if not self.place.fits(weight):
            return
        for use in uses:
            if use.given.numel() and (
                use.node is not None or self._is_compiled(output, held is not weight, trained)
            ):
                self._await(watched, use, output, trained)

    def _await(self, watched: Watched, use: Use, output: torch.Tensor, trained: bool) -> None:
        """Copy a use's keys, and wait for its gradient."""
        tape, weight = self._tape, self.weight
        if output.dtype is not weight.dtype:
            self.autocast = True
        self._attach_to(trained)
        annotations = tape.annotations
        said = watched.use if watched.use and annotations.leaves(USE) else None
        width, dtype = self.spec.d_in, _key_dtype(use.given, output, use.node)
        if watched.kind.one_hot:
            width, dtype = watched.kind.shape(watched.module)[0], PLACES
        key, leading = keys_of(use, tape.pool, width, dtype)
        if use.among is not None:
            leading = use.among[0]
        made = LookedUp if watched.flipped else Pass
        item = made(next(tape.numbers), annotations.current, leading, key, said)
        if use.among is not None:
            item.places = use.among[1].cpu().numpy()

        # Not the use itself: its node would hold a hook that holds the node, and so the graph.
        values, units = use.values, use.units

        def backward(gradient: torch.Tensor | None) -> None:
            self._backward(item, values, units, weight, gradient, trained)

        if use.node is None:
            # The product lies inside a compiled graph that ends at the layer's output. Should
            # something change the output in place, the check of the gradient will tell.
            output.register_hook(backward)
        else:
            use.node.register_prehook(lambda gradients: backward(gradients[0]))

    def _is_compiled(self, output: Any, elsewhere: bool, trained: bool) -> bool:
        """Of an output without a node of the weight's: whether a compiled graph hides it. Where
        none does, the pass is none of the layer's rows.

        Args:
            elsewhere: The module has another weight than the layer's for this call.
            trained: The weight is not frozen.

        Raises:
            CaptureError: The weight may be used in a way that is not seen.
        """
        if "CompiledFunction" in output.grad_fn.name():
            return True
        if elsewhere or _is_functional(output):
            return False  # functional_call, jacrev and the like: not through the parameter's .grad
        if not trained:
            return False  # the check of the bias's gradient will tell
        raise CaptureError(
            f"layer {self.spec.name!r} ran, but its output does not come from a product with "
            f"its weight (autograd node {output.grad_fn}); leave it out with "
            "Recorder(..., layers=[...])"
        )

    def _backward(
        self,
        item: Pass,
        values: Callable[[torch.Tensor], torch.Tensor],
        units: slice | None,
        weight: torch.Tensor,
        gradient: torch.Tensor | None,
        trained: bool,
    ) -> None:
        """The node's pre-hook: copy the value, to be committed if the weight accumulates.

        Args:
            item: The pass.
            values, units: Of its use.
            weight: The layer's in the forward; it may have been replaced since.
            trained: The weight was not frozen in the forward; it may be now.
        """
        if weight is not self.weight:
            return
        self._frozen = frozen = not (trained and self.weight.requires_grad)
        if gradient is None or (frozen and not self._trains_bias()):
            return
        if torch.is_grad_enabled():
            self.double_backward = True
        if item.gone:
            self.late = True
            return
        if frozen:
            self._attach_to(False)  # it may have been frozen since the forward
        with self._lock:
            self._look_at_gradient(frozen)
        flipped = isinstance(item, LookedUp)
        width = self.spec.d_in if flipped else self.spec.d_out
        value = self._tape.pool.take(item.rows, width, kept_as(gradient.dtype))
        value.copy_negated(values(gradient), units)
        self._tape.defer(self, (item, value))

    def _look_at_gradient(self, frozen: bool) -> None:
        """What the running backward is going to add to: was it zeroed, or does it hold more?"""
        grad = self.bias.grad if frozen and self.bias is not None else self.weight.grad
        if frozen:
            if grad is None or not grad.any():
                self.drop()
            elif not self._passes:
                self.carried = True
        elif self._passes:
            if grad is None or self._watch.zeroed(grad):
                self.drop()
        elif grad is not None and self._watch.unexplained(grad):
            self.carried = True
        self._for_each_watch(lambda watch, parameter: watch.before(parameter.grad))

    def _commit(self, alone: bool = False) -> None:
        """The running backward has accumulated into the weight, or the bias alone: it counts."""
        with self._lock:
            for item, value in self._tape.accumulated(self):
                self.alone = self.alone or alone
                item.bring(value)
                self._passes[item.number] = item
                self.ever = True

    def _attach_to(self, weight: bool) -> None:
        """Hook the weight, or while it is frozen the bias: a frozen parameter takes no hook."""
        if weight and self._on_weight is None:
            self._on_weight = self.weight.register_post_accumulate_grad_hook(self._accumulated)
        needed = not weight or self._tape.ranked
        if needed and self._on_bias is None and self.bias is not None and self.bias.requires_grad:
            self._on_bias = self.bias.register_post_accumulate_grad_hook(self._bias_accumulated)

    def _bias_accumulated(self, parameter: torch.Tensor) -> None:
        """The bias's post-accumulate hook, which counts while the weight is frozen."""
        if self._bias_watch is not None and parameter.grad is not None:
            self._bias_watch.accumulated(parameter.grad)
        if self._frozen:
            self._commit(alone=True)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """The weight's post-accumulate hook. It runs even if the weight was frozen, or a hook of
        the user's has taken its gradient: then the rows count for the bias, or not at all."""
        grad = parameter.grad
        if parameter.requires_grad and grad is not None:
            self._watch.accumulated(grad)
            self._commit()
        elif self._trains_bias():
            self._commit(alone=True)
        else:
            self._tape.accumulated(self)

    def _trains_bias(self) -> bool:
        return self.bias is not None and self.bias.requires_grad


class _ForwardHook:
    """The hook that lies in the module. In copies of the module, saved ones included, a callable of
    the standard library's that does nothing lies there: they load where dualform is not installed.

    A compiled model runs it as it is, between two graphs.
    """

    def __init__(self, layer: LayerCapture, watched: Watched) -> None:
        self._layer = weakref.ref(layer)
        self._watched = watched
        self._apart = outside_graphs(self._forward)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            self._apart(args, kwargs, output)
        else:  # the same without the compiler's wrapper, which is dear when caches are cold
            self._forward(args, kwargs, output)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self._layer()
        if layer is not None:
            layer.forward(self._watched, args, kwargs, output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _key_dtype(given: torch.Tensor, output: torch.Tensor, node: Any) -> torch.dtype:
    """What the keys are that a layer's weight multiplied: autocast rounds them to the type of the
    product, which its node knows. Where none is seen, they are kept as the layer was given them.
    """
    if output.dtype is torch.float32 or node is None:
        return kept_as(given.dtype)
    made = kept_as(node._input_metadata[0].dtype)
    return kept_as(given.dtype) if made is torch.float32 else made


def _is_functional(tensor: torch.Tensor) -> bool:
    """Whether a torch.func transform is running; its gradients are results, never `.grad`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
