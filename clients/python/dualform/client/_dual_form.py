"""A model's forward pass with chosen layers in dual form: computed from their memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.client._arrays import int64
from dualform.client._calls import checked_call, outside_compiled_code
from dualform.client._capture import without_fast_paths
from dualform.client._info import IndexInfo, LayerInfo
from dualform.client._model_layers import check_exact, check_width, chosen_layers, probe_of
from dualform.client._sync import Client
from dualform.client.errors import CallError, FailedPreconditionError, InvalidArgumentError
from dualform.v1.attribution_pb2 import Filter

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind
    from dualform.layers.base import Forward, Product

# Relative; outputs equal the trained layer's to 1e-4 (docs/exactness.md), bfloat16 copies to 1e-2.
SAME_WEIGHTS = 0.02


@checked_call
@contextmanager
def dual_form(
    model: torch.nn.Module,
    client: Client,
    *,
    layers: str | Sequence[str] | None = None,
    where: str | Filter | None = None,
    at_step: int | None = None,
    max_residual: float | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Iterator[None]:
    """Inside the block, the layers named compute their dual output through the client.

    Everything else of the model runs as it is, in the mode that it is in: call `model.eval()` first
    where there is dropout. Behind the block the layers are as before, also after an exception. The
    layers' own weights take no part, so the model may be freshly initialised if all its parameters
    are in such layers; where others stay, and the model's weights are not those that the index was
    trained to, a warning says so. Hooks run as ever. A `dualform.record.LSTM` asks once per time
    step. A block inside a block takes over the layers that it names. The layers are replaced for
    all threads, and no gradient flows through them: their output does not require grad, so a
    backward that would need to pass through them finds nothing to do below.

    Args:
        model: The model, not compiled.
        client: A `Client`, remote or local.
        layers: Names or glob patterns of the index's layers; None takes all that the model has.
        where: Which rows contribute in these layers; the initial part always stays. What such a
            masked pass means, and what not: docs/dual-form.md.
        at_step: The layers after so many steps; None for the trained layers.
        max_residual: As for `Client.dual_output`; a layer of which more is explained by no row is
            refused in the forward pass.
        index: The index's name; None where one is served.
        timeout: Seconds per question. A layer asks once per call: large batches are cheaper.

    Yields:
        None. Layers take float32 [..., d_in] (half formats are widened, which is exact) and give
        float32 [..., d_out] on the input's device.

    Raises:
        CallError: The client is no `Client`; an AsyncClient can't answer inside a forward.
        InvalidArgumentError: No module; compiled; a layer that index or model lack, or whose shape
            differs; a wrong filter, step or max_residual; in the forward an input that is not
            finite.
        FailedPreconditionError: The index has no values, or a layer no exact dual form up to that
            step; behind the block: a layer that was asked for did not run.

    Example:
        >>> with dual_form(model, client, layers=["0", "2"], where="task != 'fashion'"):
        ...     predictions = model(images).argmax(-1)
    """
    if not isinstance(client, Client):
        raise CallError(
            f"client is of type {type(client).__name__}; dual_form asks in the middle of a forward "
            'and needs a Client: Client("HOST:PORT") or Client.local(PATH)',
            field="client",
        )
    from dualform.layers import bare, module_of

    _check_model(model)
    model = bare(model)
    info = client.index(index, timeout=timeout)
    kinds = chosen_layers(model, info, layers)
    chosen = {name: module_of(model, name, kind) for name, kind in kinds.items()}
    at_step = None if at_step is None else _end(info, at_step)
    for name in chosen:
        check_exact(info.layers[name], at_step)
    if where is not None or max_residual is not None:
        _check_question(client, info, chosen, where, max_residual, index, timeout)
    _warn_of_another_model(model, client, info, kinds, at_step, index, timeout)

    def answer(name: str, queries: torch.Tensor) -> Any:
        found = client.dual_output(
            name,
            queries,
            where=where,
            at_step=at_step,
            max_residual=max_residual,
            index=index,
            timeout=timeout,
        )
        return check_width(name, info.layers[name].d_out, found.values)

    calls = dict.fromkeys(chosen, 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            calls[name] += 1

        return count

    with ExitStack() as restore:
        restore.enter_context(without_fast_paths())
        taken = set(map(id, chosen.values()))
        for kind in kinds.values():
            if kind.host is not None and id(kind.host) not in taken:
                taken.add(id(kind.host))
                restore.enter_context(_replaced(kind.host, kind.host_forward()))
        for name, layer in chosen.items():
            # The hook also keeps fused fast paths, which bypass `forward`, from being taken.
            restore.callback(layer.register_forward_pre_hook(counter(name)).remove)
            forward = kinds[name].dual_forward(layer, _product(info.layers[name], answer))
            forward = outside_compiled_code(_saying_what_fits(forward))
            restore.enter_context(_replaced(layer, forward))
        yield
    silent = [name for name, count in calls.items() if not count]
    if layers is not None and silent:
        raise FailedPreconditionError(
            f"these layers did not run inside the block: {', '.join(silent)}; leave them out of "
            "layers=, and where the model uses their weights without calling them, its output is "
            "not the dual form's",
            field="layers",
        )


def _product(info: LayerInfo, answer: Callable[[str, torch.Tensor], Any]) -> Product:
    """A layer's product with queries [..., d_in], in dual form."""
    import torch

    exact = (torch.float32, torch.float16, torch.bfloat16)

    def product(input: torch.Tensor) -> torch.Tensor:
        if input.dtype not in exact:
            raise InvalidArgumentError(
                f"layer {info.name!r} sees {str(input.dtype).removeprefix('torch.')}; keys and "
                "queries are float32: run the model with model.float()",
                field="model",
            )
        if input.ndim == 0 or input.shape[-1] != info.d_in:
            raise InvalidArgumentError(
                f"layer {info.name!r} sees shape {list(input.shape)}; it takes [..., {info.d_in}]",
                field="model",
            )
        shape = (*input.shape[:-1], info.d_out)
        if not input.numel():
            return torch.zeros(shape, device=input.device)
        queries = input.detach().reshape(-1, info.d_in).float()
        return torch.from_numpy(answer(info.name, queries)).to(input.device).reshape(shape)

    return product


def _saying_what_fits(forward: Forward) -> Forward:
    """The forward, with the error of a wrong shape as the client's."""
    from dualform.layers import ShapeError

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except ShapeError as wrong:
            raise InvalidArgumentError(str(wrong), field="model") from None

    return checked


@contextmanager
def _replaced(layer: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """`layer.forward` is another inside; behind it, what it was, on the instance or the class."""
    before = vars(layer).get("forward")
    # On the instance: the class, and other layers of it, stay as they are.
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def _check_model(model: object) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model is of type {type(model).__name__}; a torch.nn.Module is needed", field="model"
        )
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise InvalidArgumentError(
                f"{f'module {name!r}' if name else 'the model'} is compiled, and compiled code may "
                "go on using the layers' weights; pass and call the original (_orig_mod of what "
                "torch.compile gave)",
                field="model",
            )


def _end(info: IndexInfo, at_step: int) -> int:
    end = int64(at_step, "at_step")
    if not 0 <= end <= info.steps:
        raise InvalidArgumentError(
            f"at_step is {at_step}; training had {info.steps} steps, so it is one of 0 to "
            f"{info.steps}",
            field="at_step",
        )
    return end


def _check_question(
    client: Client,
    info: IndexInfo,
    chosen: Mapping[str, object],
    where: str | Filter | None,
    max_residual: float | None,
    index: str | None,
    timeout: float | None,
) -> None:
    """What is wrong is refused now; at step 0 no row takes part, so that asking costs nothing."""
    for name in chosen:
        client.dual_output(
            name,
            np.zeros((1, info.layers[name].d_in), np.float32),
            where=where,
            at_step=0,
            max_residual=max_residual,
            index=index,
            timeout=timeout,
        )


def _warn_of_another_model(
    model: torch.nn.Module,
    client: Client,
    info: IndexInfo,
    kinds: Mapping[str, LayerKind],
    at_step: int | None,
    index: str | None,
    timeout: float | None,
) -> None:
    """Layers outside the block keep the model's weights, which should be of the same training.

    Told by the layers inside it: one product of each with a random vector, in model and index.
    """
    from dualform.layers import module_of

    inside = {
        id(parameter)
        for name, kind in kinds.items()
        for parameter in module_of(model, name, kind).parameters()
    }
    if all(id(parameter) in inside for parameter in model.parameters()):
        return
    for name, kind in kinds.items():
        layer = module_of(model, name, kind)
        probe, of_model = probe_of(kind, layer)
        # Either the checkpoint of that step is meant, or the trained model, where that is known.
        for step in {at_step} if info.layers[name].inexact else {at_step, None}:
            found = client.dual_output(
                name, probe, at_step=step, max_residual=np.inf, index=index, timeout=timeout
            )
            of_index = found.values if found.trained is None else found.trained
            check_width(name, of_model.shape[-1], of_index)
            if np.linalg.norm(of_index - of_model) <= SAME_WEIGHTS * np.linalg.norm(of_model):
                break
        else:
            warnings.warn(
                f"layer {name!r} of the model holds other weights than the index was trained to: "
                "is this the model that was recorded, with its checkpoint loaded? Layers that are "
                "not in dual form keep what the model holds",
                stacklevel=4,
            )
            return
