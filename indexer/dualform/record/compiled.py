"""What recording needs of `torch.compile`: that compiled code sees the recorder's hooks.

Compiled code belongs to a class, not to a model, and by default nothing in it asks whether a model
has hooks: what was compiled for one without would run for one that is recorded.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import nn

from dualform.record.errors import CaptureError

_BREAK = (
    "dualform records this layer, which breaks the compiled graph in two; compile with "
    "fullgraph=False while recording, or leave the layer out with Recorder(..., layers=[...])"
)
_STEP_BREAK = "dualform reads the optimizer before and after each step"
_F = TypeVar("_F", bound=Callable[..., Any])


def outside_graphs(function: _F, reason: str = _BREAK) -> _F:
    """The function, run as it is between two compiled graphs. Where no break is allowed, the
    compiler's error says what to do, which is the reason."""
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class StepHook:
    """A hook of an optimizer's step. A compiled step runs it as it is, between two graphs.

    Args:
        hook: Called with the optimizer, the step's arguments, and whether the step is compiled.
    """

    def __init__(self, hook: Callable[[Any, tuple[Any, ...], dict[str, Any], bool], Any]) -> None:
        self._hook = hook
        self._apart = outside_graphs(hook, _STEP_BREAK)

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._apart(optimizer, args, kwargs, True)
        return self._hook(optimizer, args, kwargs, False)


def evaluated_apart(closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure for a compiled step, which is run as it is."""
    return outside_graphs(closure, _STEP_BREAK)


def check_compiled(model: nn.Module) -> None:
    """Refuse a model whose compiled graph must be whole.

    Raises:
        CaptureError: It was compiled with fullgraph=True.
    """
    context = getattr(model, "dynamo_ctx", None)
    if getattr(context, "fullgraph", False) or getattr(context, "nopython", False):
        raise CaptureError(f"the model was compiled with fullgraph=True: {_BREAK}")


class HooksSeen:
    """From its making until `close`, compiled code asks for hooks before it runs.

    Code that was compiled earlier for a class that the model has modules of is forgotten, so that
    it is compiled anew when it runs next.

    Args:
        model: The model that gets hooks.
    """

    _lock = threading.Lock()
    _open = 0
    _before = True

    def __init__(self, model: nn.Module) -> None:
        config = torch._dynamo.config
        with HooksSeen._lock:
            if HooksSeen._open == 0:
                HooksSeen._before = config.skip_nnmodule_hook_guards
                config.skip_nnmodule_hook_guards = False
            HooksSeen._open += 1
        if any(map(_has_run, {type(module) for module in model.modules()})):
            torch._dynamo.reset_code_caches()  # type: ignore[no-untyped-call,unused-ignore]

    def close(self) -> None:
        """Leave the setting as it was found, once no recorder needs it."""
        with HooksSeen._lock:
            HooksSeen._open -= 1
            if HooksSeen._open == 0:
                torch._dynamo.config.skip_nnmodule_hook_guards = HooksSeen._before


def _has_run(kind: type[nn.Module]) -> bool:
    """Whether there is compiled code of this class's forward pass."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return code is not None and bool(entries(code))
