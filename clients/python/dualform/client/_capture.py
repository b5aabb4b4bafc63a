"""Queries from a model: what its layers see for given inputs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import meant, patterns_of
from dualform.client._calls import checked_call
from dualform.client._fork import use_torch
from dualform.client.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind

# Training flags, hooks, torch's random state and its fast paths are shared by all threads.
_one_pass = threading.RLock()
# How to leave models as they were, by the thread that runs them.
_undo: dict[int, list[Callable[[], None]]] = {}


def _begin_again() -> None:
    """In a forked child: other threads' passes end here, and their lock is nobody's."""
    global _one_pass
    _one_pass = threading.RLock()
    for thread in [thread for thread in _undo if thread != threading.get_ident()]:
        for undo in reversed(_undo.pop(thread)):
            undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)

Queries = dict[str, npt.NDArray[np.float32]]


@checked_call
def capture_queries(
    model: torch.nn.Module,
    *inputs: Any,
    layers: str | Sequence[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Queries:
    """What each linear layer sees in one pass of `model(*inputs, **kwargs)`.

    The pass runs in eval mode without gradients. Each module's training flag, torch's random state
    (CPU and CUDA), buffers and hooks are afterwards as they were, also after an exception.

    Args:
        model: Any module; of a compiled one the original runs.
        *inputs: What its forward takes, on the model's device.
        layers: Names or glob patterns as in `model.named_modules()`; None takes every layer that
            can be recorded and runs, without embeddings, whose queries are as long as their tables;
            an LSTM's keys are [h; x].
        kwargs: Keyword arguments of the forward.

    Returns:
        By layer name float32 [n, d_in], on the CPU, one row per position of the leading
        dimensions; of a layer that runs several times all rows, in the order of the calls.

    Raises:
        InvalidArgumentError: `model` is no module, or a pattern matches no linear layer.
        FailedPreconditionError: A layer that was asked for by name or pattern does not run, or an
            input of a layer is float64, which float32 can't hold.

    Example:
        >>> queries = capture_queries(model, images)
        >>> hits = client.top_k("0", queries["0"])
    """
    import torch

    check_hooks_fire(model, layers)
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model is of type {type(model).__name__}; a torch.nn.Module is needed", field="model"
        )
    from dualform.layers import bare, module_of

    # A compiled model's hooks do not fire once it has run, and a data-parallel one may wait for
    # other processes.
    model = bare(model)
    selected = _selected(model, layers)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in selected}
    with ExitStack() as stack:
        for context in (undisturbed(model), without_fast_paths(), torch.no_grad()):
            stack.enter_context(context)
        for name, kind in selected.items():
            layer = module_of(model, name, kind)
            hook = _recorder(name, kind, layer, seen[name])
            called = kind.host or layer
            handle = called.register_forward_hook(hook, with_kwargs=True)
            stack.enter_context(undone(handle.remove))
        model(*inputs, **dict(kwargs or {}))
    silent = [name for name, keys in seen.items() if not keys]
    if layers is not None and silent:
        raise FailedPreconditionError(
            f"these layers did not run: {', '.join(silent)}; leave them out of layers= (a layer "
            "whose weight is used through F.linear, like nn.MultiheadAttention's out_proj, never "
            "runs itself)",
            field="layers",
        )
    return {name: torch.cat(keys).numpy() for name, keys in seen.items() if keys}


def check_hooks_fire(model: object, layers: object) -> None:
    """Scripted, traced and exported models run without their layers' Python: no hook sees in."""
    import torch

    remedy = "pass the nn.Module that it was made from, with the same weights"
    if type(model).__name__ == "ExportedProgram":
        raise InvalidArgumentError(
            f"model is an ExportedProgram, whose layers can't be watched; {remedy}", field="model"
        )
    if not isinstance(model, torch.nn.Module):
        return
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        scripted = isinstance(module, torch.jit.ScriptModule)
        # With layers= the others may be as they are.
        if scripted and (not name or layers is None) and _has_linear(module):
            raise InvalidArgumentError(
                f"{where} is scripted or traced, and its layers can't be watched; {remedy}"
                + (", or name the other layers in layers=" if name else ""),
                field="model",
            )
        if isinstance(module, torch.fx.GraphModule) and "eval" in vars(module):
            raise InvalidArgumentError(
                f"{where} is exported, and its layers can't be watched; {remedy}", field="model"
            )


def _has_linear(scripted: Any) -> bool:
    kinds = {getattr(module, "original_name", "") for module in scripted.modules()}
    return bool(kinds & {"Linear", "LSTM"})


def _selected(model: torch.nn.Module, layers: str | Sequence[str] | None) -> dict[str, LayerKind]:
    from dualform.layers import layers_of

    found = layers_of(model)
    if layers is None:
        return {name: kind for name, kind in found.items() if not kind.one_hot}
    chosen: set[str] = set()
    for pattern in patterns_of(layers):
        named = meant(pattern, found)
        if not named:
            raise InvalidArgumentError(
                f"layers: {pattern!r} matches no linear layer; there are: "
                f"{', '.join(map(repr, found)) or 'none'}",
                field="layers",
            )
        chosen.update(named)
    return {name: kind for name, kind in found.items() if name in chosen}


def _recorder(name: str, kind: LayerKind, layer: torch.nn.Module, keys: list[torch.Tensor]) -> Any:
    import torch

    def hook(called: Any, args: Any, kwargs: Any, output: Any) -> None:
        key = kind.queries(layer, args, kwargs, output)
        if key.dtype == torch.float64:
            raise FailedPreconditionError(
                f"layer {name!r} sees float64; keys and queries are float32: run the model with "
                "model.float()",
                field="model",
            )
        # Copied at once: the model may write into its input later. Half formats fit exactly.
        copy = key.detach().reshape(-1, key.shape[-1]).to("cpu", torch.float32, copy=True)
        keys.append(copy)

    return hook


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Inside, torch's transformer layers run module by module, which hooks see."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    with undone(lambda: torch.backends.mha.set_fastpath_enabled(before)):
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode inside; flags, random state and buffers as before behind it. One thread at a time:
    another's hooks would see this one's pass.

    Raises:
        FailedPreconditionError: As `use_torch`.
    """
    use_torch()
    with _one_pass, undone(_restoring(model)):
        model.eval()
        yield


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Calls `undo` behind it; in a child that is forked while another thread is inside, there."""
    of_thread = _undo.setdefault(threading.get_ident(), [])
    of_thread.append(undo)
    try:
        yield
    finally:
        of_thread.remove(undo)
        undo()


def _restoring(model: torch.nn.Module) -> Callable[[], None]:
    """What makes flags, random state and buffers what they are now."""
    import torch

    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    random_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        for module, training in flags:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                if buffer is not None and content is not None and not _same(buffer, content):
                    buffer.copy_(content)
                module._buffers[name] = buffer
        torch.set_rng_state(random_state)
        if cuda_states and torch.cuda.is_initialized():  # not so in a child
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


def _same(buffer: Any, content: Any) -> bool:
    import torch

    # Bytes, so that NaN equals itself; and nothing is written where nothing changed.
    return torch.equal(
        buffer.contiguous().reshape(-1).view(torch.uint8),
        content.contiguous().reshape(-1).view(torch.uint8),
    )
