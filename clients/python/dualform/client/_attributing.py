"""How a model's prediction is attributed: the model is run here, the index asked, free of any
transport (`_asking`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client._answers import dual_output_of
from dualform.client._asking import Asking, Steps, halved, located
from dualform.client._attribution import AttributionResult, attribution_of, join_attributions
from dualform.client._info import IndexInfo, ServerLimits
from dualform.client._model_layers import check_exact, check_width, chosen_layers, probe_of
from dualform.client._retry import Deadline
from dualform.client._scores import Collector, ScoresResult, scores_of
from dualform.client._targets import Target, target_of
from dualform.client.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from dualform.questions import (
    AttributedLayer,
    AttributeQuestion,
    IndexQuestion,
    OutputQuestion,
)
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    from dualform.client._gradients import Gradients
    from dualform.layers import LayerKind

T = TypeVar("T")

_ROUNDED = {2: 0.02, 4: 1e-4, 8: 1e-4}
"""By the bytes of a parameter, how far its layer may be from the index's: rounding, and no more."""

_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Attributing:
    """A question about a model's outputs.

    Attributes:
        model, inputs, target, labels, token, together, layers, check_model: As for
            `Client.attribute`.
        asked: What is asked of the index, but for the layers and inputs.
        where: What the user gave as filter.
    """

    model: Any
    inputs: Any
    target: Target
    labels: object
    token: object
    together: bool
    layers: str | Sequence[str] | None
    check_model: bool
    asked: Mapping[str, Any]
    where: str | pb.Filter | None

    def attribute(self, asking: Asking, timeout: float | None) -> Steps[AttributionResult]:
        """See Client.attribute."""
        k = self.asked["k"]
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
            raise InvalidArgumentError(f"k is {k!r}; it must be an integer, at least 1", field="k")
        deadline = asking.deadline(timeout)
        found = yield from self.run(asking, deadline)
        parts: list[AttributionResult] = []
        yield from self.ask(asking, deadline, found, attribution_of, parts.append)
        return join_attributions(parts)

    def scores(
        self, asking: Asking, timeout: float | None, path: Path | None
    ) -> Steps[ScoresResult]:
        """See Client.scores."""
        deadline = asking.deadline(timeout)
        found = yield from self.run(asking, deadline)
        collector = Collector(path, len(found.targets))
        try:
            yield from self.ask(asking, deadline, found, scores_of, collector.take)
            return collector.result()
        except BaseException:
            collector.give_up()
            raise

    def run(self, asking: Asking, deadline: Deadline) -> Steps[Gradients]:
        """Run the model, once it is the one that was recorded."""
        from torch.nn.parallel import DataParallel, DistributedDataParallel

        from dualform.client._gradients import gradients_of

        if isinstance(self.model, (DataParallel, DistributedDataParallel)):
            # Layers are called as in the model that these wrap.
            found = yield from replace(self, model=self.model.module).run(asking, deadline)
            return found
        for name in ("check_model", "together"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                raise InvalidArgumentError(
                    f"{name} is {given!r}; True or False is needed", field=name
                )
        check_model(self.model)
        index = self.asked["index"]
        info: IndexInfo = yield from asking.index(IndexQuestion(index=index), deadline.remaining())
        kinds = chosen_layers(self.model, info, self.layers)
        for name in kinds:
            check_exact(info.layers[name], None)
        if self.check_model:
            yield from self._check_same(asking, deadline, kinds)
        number = partial(target_of, target=self.target, labels=self.labels, token=self.token)
        return gradients_of(self.model, self.inputs, number, kinds, together=self.together)

    def _check_same(
        self, asking: Asking, deadline: Deadline, kinds: Mapping[str, LayerKind]
    ) -> Steps[None]:
        """Refuse a model whose layers are not the index's trained ones."""
        from dualform.layers import module_of

        for name, kind in kinds.items():
            layer = module_of(self.model, name, kind)
            probe, of_model = probe_of(kind, layer)
            question = OutputQuestion(
                name, probe, max_residual=float("inf"), index=self.asked["index"]
            )
            answer = yield from asking.send(question, deadline, dual_output_of)
            of_index = answer.values if answer.trained is None else answer.trained
            check_width(name, of_model.shape[-1], of_index)
            size = np.linalg.norm(of_model)
            off = np.linalg.norm(of_index - of_model) / max(float(size), 1e-30)
            most = _ROUNDED[kind.matrix(layer).element_size()]
            if not off <= most:
                raise FailedPreconditionError(
                    f"layer {name!r} of the model is not what the index was trained to: the "
                    f"outputs for a random vector differ by {off:.2g} of their length, rounding "
                    f"explains {most:g}; load that run's trained checkpoint into the model, "
                    "or pass check_model=False to ask all the same",
                    reason="ANOTHER_MODEL",
                    field="model",
                )

    def ask(
        self,
        asking: Asking,
        deadline: Deadline,
        found: Gradients,
        reader: Callable[..., T],
        take: Callable[[T], None],
    ) -> Steps[None]:
        """Ask, in as many parts as the server's limits need; each is taken as it comes."""
        limits = yield from asking.known_limits(deadline)
        n = len(found.targets)
        whole = AttributeQuestion(layers=found.layers, inputs=n, **self.asked)
        sizes = _bytes_of_inputs(found.layers, n)
        start, most = 0, n
        while start < n:
            count = min(most, _fitting(sizes[start:], whole, limits))
            inside = slice(start, start + count)
            layers = tuple(layer.part(start, start + count) for layer in found.layers)
            said = {"targets": found.targets[inside], "unrecorded": found.unrecorded[inside]}
            try:
                part = yield from asking.send(
                    replace(whole, layers=layers, inputs=count), deadline, partial(reader, **said)
                )
            except ResourceExhaustedError as error:
                most = halved(error, count)
                continue
            except InvalidArgumentError as error:
                raise located(error, self.where) from None
            take(part)
            start += count


def check_model(model: object) -> None:
    """Refuse what hooks can't see into."""
    import torch

    from dualform.client._capture import check_hooks_fire

    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model is of type {type(model).__name__}; a torch.nn.Module is needed", field="model"
        )
    check_hooks_fire(model, None)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise InvalidArgumentError(
                f"{f'module {name!r}' if name else 'the model'} is compiled, and its layers can't "
                "be watched; pass the original (_orig_mod of what torch.compile gave)",
                field="model",
            )


def _bytes_of_inputs(layers: Sequence[AttributedLayer], n: int) -> npt.NDArray[np.int64]:
    """What each input takes of a message: int64 [n]."""
    sizes = np.zeros(n, np.int64)
    for layer in layers:
        each = sum(matrix.shape[1] for matrix in layer.matrices) * 4 + 10
        inputs = np.arange(n) if layer.inputs is None else layer.inputs
        sizes += np.maximum(np.bincount(inputs, minlength=n), 1) * each
    return sizes


def _fitting(
    sizes: npt.NDArray[np.int64], question: AttributeQuestion, limits: ServerLimits
) -> int:
    """How many of these inputs one request holds; at least one."""
    where = 0 if question.where is None else question.where.ByteSize()
    room = limits.max_message_bytes - where - _HEADER_BYTES
    room -= sum(len(layer.layer) + 64 for layer in question.layers)
    if sizes[0] > room:
        raise ResourceExhaustedError(
            f"one input takes {int(sizes[0]) / 2**20:,.1f} MiB of a request, and the server takes "
            f"{limits.max_message_bytes / 2**20:,.0f}: its layers see many places; leave the "
            "widest out with layers=, or raise the server's max_message_mib",
            field="inputs",
        )
    fit = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
    return max(1, min(fit, limits.max_queries))
