"""The recorder: ties hooks, optimizer steps, annotation and checks to a sink."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from dualform.record.annotations import Annotations
from dualform.record.blocks import StepBlocks, rows_bytes
from dualform.record.buffers import Pool
from dualform.record.compiled import HooksSeen, StepHook, check_compiled, evaluated_apart
from dualform.record.copies import Copies
from dualform.record.coverage import say, size_text, some_of
from dualform.record.disk import DiskSink, check_pack
from dualform.record.elements import SampledElements
from dualform.record.errors import RecorderClosedError, RecordError, ResumeError
from dualform.record.examples import ExampleIntake
from dualform.record.fitting import Fitting
from dualform.record.joined import JoinedLayer
from dualform.record.optimizer import OptimizerView
from dualform.record.ranks import Replica
from dualform.record.recorded import RecordedLayer
from dualform.record.resume import resume
from dualform.record.row_choice import check_values_and_steps, reason_of, sampling_of
from dualform.record.selection import select_layers
from dualform.record.sink import Sink, StepBatch
from dualform.record.tape import Tape
from dualform.record.unclosed import closed_in_the_end
from dualform.record.wrapped import check_given, unwrapped
from dualform.store.ledger import InexactMark
from dualform.store.recording_format import RecordingManifest

_LOGGER = logging.getLogger("dualform.record")
_POOL_BYTES = 256 << 20
_STEPS_WITHOUT_IDS = 50
"""After so many steps without an example's id a warning comes, once."""

_Layer = RecordedLayer | JoinedLayer

IN_THE_LOOP = (
    "let batches carry what is annotated (dualform.record.indexed does so with ids), and call "
    "annotate in the training loop, before the forward pass; where a forked process trains, make "
    "the recorder there"
)
"""What to do instead of taking a recorder to another process."""

STATE_RATIO = 64
"""A state is kept whenever so many times its bytes were recorded since the last: at most 1.6 % more
to write."""


class Recorder:
    """Records the training memory of a model's linear layers while it trains.

    Training is bit-identical with and without it.

        with Recorder(model, optimizer, "runs/mnist") as recorder:
            for images, labels in loader:
                recorder.annotate(label=labels)
                ...                      # forward, zero_grad, backward, step as ever

    Args:
        model: The whole model, already on its device. Wrapped in DistributedDataParallel, each
            process records its own rows in a folder of its own, `rank-0` and so on, below the path.
        optimizer: Exact for the families of `dualform.optimizers` (SGD, Adam, AdamW and most of
            torch.optim, with schedules and clipping); for any other the attention weights stay
            exact and the recording says that the rest is not. What `accelerator.prepare` and
            Lightning's `self.optimizers()` return will do: the optimizer that they wrap is
            recorded.
        path_or_sink: A directory that does not exist yet, or a sink.
        layers: Names or glob patterns as in `model.named_modules()` (of a compiled model: of the
            one it was made from); None for every supported layer that is called, whose weight the
            optimizer holds, neither parametrised nor tied.
        values: False records keys alone: enough for attention weights, not for outputs.
        resume_at_step: Continue the recording at this path after so many of its steps: those of the
            checkpoint that the model and the optimizer were loaded from, before this call. Steps
            that were recorded after it are dropped.
        steps: How many optimizer steps are planned, if known: a warning comes before the first
            one where they do not fit the disk.
        every: Record the rows of steps 0, N, 2 N, ... alone.
        sample: Record so large a part of the examples, above 0 and at most 1, drawn at each step.
        seed: Of the draws, which depend on it and the step's number alone.
        zero_rows: False leaves out rows whose value is exactly zero: they add nothing to any
            output, but have attention weights.

            What rows that were left out added is in the remainder of outputs, and the layer is
            marked; zero rows add nothing. How many there were is kept.
        pack: Pack keys and values on their way to disk, bit for bit, each layer's by the way that
            is the shortest for them: about half of a network with ReLU is left. Takes processor
            time, in the writing thread; `dualform record pack` does the same after training.

    Raises:
        OptionError: `values`, `steps`, `every`, `sample`, `seed`, `zero_rows`, `pack` or the path
            has no such value.
        LayerSelectionError: `layers` names nothing that can be recorded, weights are sharded or
            copied to several devices, or `model` is none.
        OptimizerError: `optimizer` is none.
        RecordingExistsError: The path exists, and `resume_at_step` is not given.
        RecordingFailedError: The recording can't be started, such as on a full disk.
        ResumeError: The recording can't be continued from there; nothing of it was dropped.

    All of them are RecordErrors. Whatever is raised here leaves nothing behind: no folder, no
    thread, no hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        path_or_sink: str | os.PathLike[str] | Sink,
        *,
        layers: Sequence[str] | None = None,
        values: bool = True,
        resume_at_step: int | None = None,
        steps: int | None = None,
        every: int = 1,
        sample: float = 1.0,
        seed: int = 0,
        zero_rows: bool = True,
        pack: bool = False,
    ) -> None:
        self._sampling = sampling_of(every, sample, seed, zero_rows)
        check_values_and_steps(values, steps)
        is_path = isinstance(path_or_sink, (str, os.PathLike))
        check_given(model, path_or_sink)
        check_pack(pack, is_path or isinstance(path_or_sink, DiskSink))
        optimizer = unwrapped(optimizer)
        check_compiled(model)
        self._optimizer = OptimizerView(optimizer)
        selection = select_layers(model, layers, self._optimizer.holds)
        self._coverage = selection.coverage
        self._annotations, self._fitting = Annotations(), Fitting()
        self._replica = Replica(model)
        self._copies = Copies(parameter.device for parameter in model.parameters())
        pool = Pool(_POOL_BYTES, self._copies)
        self._tape = Tape(pool, self._annotations, self._replica.share)
        if self._replica.rank is not None:
            self._tape.averaged = self._averaged
        random = np.random.default_rng()
        sampled = SampledElements(self._optimizer.family)
        self._layers: list[_Layer] = [
            (JoinedLayer if item.parts else RecordedLayer)(
                item, self._optimizer, self._tape, random, sampled
            )
            for item in selection.layers
        ]
        self._values, self._pack = values, pack
        self._planned_steps = steps
        self._step = self._first_step = 0
        self._bytes_since_state = self._bytes_per_state = 0
        self._left_out: set[str] = set()
        self._said_empty = self._said_not_mean = False
        self._open_step: StepBatch | None = None
        self._marks: list[tuple[str, InexactMark]] = []
        self._unsaid: dict[InexactMark, list[str]] = {}
        self._examples = ExampleIntake()
        self._closed = False
        self._process = os.getpid()
        if is_path:
            path_or_sink = DiskSink(self._replica.path(path_or_sink))  # type: ignore[arg-type]
        self._sink: Sink = path_or_sink  # type: ignore[assignment]
        specs = {layer.spec.name: layer.spec for layer in self._layers}
        manifest = RecordingManifest(
            self._optimizer.name,
            specs,
            values,
            _program(),
            self._sampling,
            self._replica.rank,
            self._coverage.left_out,
            pack,
        )
        self._hooks_seen = HooksSeen(model)
        self._closure: Callable[[], Any] | None = None
        # One for all steps: a compiled step is compiled for the closure that it is given.
        self._apart = evaluated_apart(self._evaluate)
        self._handles = [
            optimizer.register_step_pre_hook(StepHook(self._before_step)),
            optimizer.register_step_post_hook(StepHook(self._after_step)),
        ]
        try:
            for layer in self._layers:
                layer.attach()
            if resume_at_step is None:
                self._sink.open(manifest)
            else:
                self._resume(manifest, resume_at_step)
        except BaseException:
            self._closed = True
            self._unhook()
            raise
        closed_in_the_end(self)

    def annotate(self, /, *, rows: Any = None, **columns: Any) -> None:
        """Say what the rows of the following passes are, until the next call or step.

        Args:
            rows: Which of them are recorded at all: booleans, one per example [batch] or per row
                [batch, time], such as `labels != -100`; None for all. A layer with one row for
                several of them has it recorded if any is.
            columns: By name; `example` (an id), `label`, `task`, and any others. Each is one value
                for the whole batch, one per example [batch], or one per row [batch, time]:
                integers, floating-point numbers, strings or booleans, as lists, NumPy arrays or
                tensors. Copied at once. Of an empty batch it is empty, of whatever type.

        Raises:
            AnnotationError: A reserved name, a type that cannot be stored, or one that the column
                did not have before; `rows` is no mask. Sizes are checked at the step, before it
                moves the weights.
            RecorderClosedError: After `close`.
            RecordError: In another process, such as a worker of a DataLoader.
        """
        self._check_open()
        self._annotations.set(columns, rows)

    def annotate_step(self, /, **columns: Any) -> None:
        """Say what is known of a step once its forward passes have run, such as its loss.

            loss.backward()
            recorder.annotate_step(loss=loss)
            optimizer.step()

        Args:
            columns: By name, one value for all rows of the step, kept until `optimizer.step()`;
                where a pass has a column of that name of its own, that one stays. A tensor on a GPU
                is waited for.

        Raises:
            AnnotationError: A reserved name, a type that cannot be stored, or one that the column
                did not have before; several values.
            RecorderClosedError: After `close`.
        """
        self._check_open()
        self._annotations.set_step(columns)

    def add_examples(
        self, ids: Sequence[int] | Sequence[str] | np.ndarray, payloads: Sequence[bytes | str]
    ) -> None:
        """Keep what people want to look at: PNG bytes, other bytes, or text, by example id.

        An id that was given before keeps its first payload, so the call may stand in the loop.

        Raises:
            AnnotationError: Lengths or types do not fit.
            RecorderClosedError: After `close`.
        """
        self._check_open()
        new = self._examples.take(ids, payloads)
        if new is not None:
            self._sink.add_examples(*new)

    def close(self) -> None:
        """Record the final state, write everything, and remove all hooks. Twice does no harm.

        Raises:
            RecordingFailedError: The sink failed, such as on a full disk.
        """
        if self._closed or os.getpid() != self._process:  # a fork's copy has no part in it
            return
        self._closed = True
        self._unhook()
        for layer in self._layers:
            # What was exchanged after the last step: the layer is not what that step left.
            self._mark(layer, layer.check_parameters(max(self._step - 1, self._first_step)))
            with np.errstate(all="ignore"):
                self._mark(layer, layer.check_weights(self._step))
        self._say_marks()
        self._sink.close(self._state(), tuple(self._marks))

    def close_at_exit(self) -> None:
        """Close what the program did not, and say so; called as it ends. In a forked process, which
        has no part in the recording, nothing."""
        if self._closed or os.getpid() != self._process:
            return
        _LOGGER.warning(
            "the recorder of %s was not closed; closing it as the program ends. Use "
            "`with Recorder(...)`, or call close() after the last step",
            getattr(self._sink, "path", type(self._sink).__name__),
        )
        try:
            self.close()
        except RecordError as failure:
            _LOGGER.error("while closing: %s", failure)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except RecordError as failure:  # the loop's own exception must be what the user sees
            _LOGGER.error("while closing after %r: %s", error, failure)

    def _before_step(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: bool,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The step's pre-hook. SGD evaluates a closure before it looks at its gradients, after all
        other pre-hooks: ours is put there, around the user's where there is one.
        """
        self._optimizer.compiled = compiled
        closure: Callable[[], Any] | None = kwargs.get("closure")
        if closure is None and len(args) > 1:
            closure = args[1]
        if closure is None and not self._optimizer.exact:
            self._prepare()
            return None

        self._closure = closure
        return args[:1], {**kwargs, "closure": self._apart if compiled else self._evaluate}

    def _evaluate(self) -> Any:
        """What a step is given for its closure."""
        closure, self._closure = self._closure, None
        loss = None if closure is None else closure()
        self._prepare()
        return loss

    @np.errstate(all="ignore")
    def _prepare(self) -> None:
        """Close the accumulation: judge the gradients, build the step. Weights are as before."""
        self._check_process()
        self._sink.check()
        self._optimizer.refresh()
        step = self._step
        ledger, kept = [], []
        self._mark_other_than_mean()
        for layer in self._layers:
            layer.look_ahead()
        self._copies.wait()
        for layer in self._layers:
            self._mark(layer, layer.check_parameters(step))
            due = step == self._first_step or step % layer.check_every == 0
            self._mark(layer, layer.check_weights(step) if due else layer.check_still(step))
            rows, mark = layer.judge(step)
            ledger.extend(rows)
            self._mark(layer, mark)
            kept += [(layer.spec.name, item) for item in layer.kept]
        self._copies.forget()
        self._say_marks()
        blocks = StepBlocks(step, kept, self._fitting, self._sampling, self._annotations.step)
        if step == self._first_step:  # before rows are left out
            size = rows_bytes([item for _, item in kept], self._values)
        taken = [blocks.take(name, item, self._values) for name, item in kept]
        passes = [item for item in taken if item is not None]
        self._mark_left_out(blocks)
        batch = StepBatch(
            step, passes, blocks.blocks, ledger, tuple(self._marks), dropped=blocks.dropped
        )
        if step == self._first_step:
            self._begin(batch, size)
        self._open_step = batch

    def _begin(self, batch: StepBatch, whole: int) -> None:
        """Start the sink with the first step, and say what is recorded.

        Args:
            whole: Bytes of all of its rows, those included that are left out.
        """
        size = batch.written if batch.passes else int(whole * self._sampling.sample)
        size //= self._sampling.every
        self._sink.begin(self._state(), size, self._planned_steps)
        if not self._replica.first:
            return
        room = getattr(self._sink, "room", None)
        to = "" if room is None else f", to {room(size, self._planned_steps)}"
        ranks = self._replica.rank and self._replica.rank.world
        line = self._coverage.first_line(size, self._sampling.options, to, ranks, self._pack)
        if self._values and not self._optimizer.family.explains:
            keys = batch._replace(passes=[item._replace(values=None) for item in batch.passes])
            line += (
                f". What a row moved is not known under {self._optimizer.name}, so values serve no "
                f"answer: values=False takes {size_text(keys.written // self._sampling.every)} "
                "per step"
            )
        say(line)

    def _after_step(self, *_: Any) -> None:
        """The step's post-hook: the weights have moved."""
        batch, self._open_step = self._open_step, None
        if batch is None:
            return
        self._tape.discard()
        self._annotations.clear()
        self._annotations.step = {}
        self._marks.clear()
        for layer in self._layers:
            layer.advance()
        self._step += 1
        if self._step - self._first_step == _STEPS_WITHOUT_IDS and not self._annotations.has(
            "example"
        ):
            _LOGGER.warning(
                "%d steps were recorded and none was annotated with example ids, so answers can't "
                "say which examples their rows are of: recorder.annotate(example=ids); "
                "dualform.record.indexed(dataset) makes batches carry ids",
                _STEPS_WITHOUT_IDS,
            )
        self._sink.append(self._with_state(batch))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._hooks_seen.close()
        self._tape.discard()
        for layer in self._layers:
            layer.detach()

    def _with_state(self, batch: StepBatch) -> StepBatch:
        """The step's batch, with the state after it where that is due: the layers' that are exact
        and have values, as nothing else starts from a stored state."""
        self._bytes_since_state += batch.by_rows
        if self._bytes_since_state <= self._bytes_per_state:
            return batch
        layers = [layer for layer in self._layers if layer.exact] if self._values else []
        layers = [layer for layer in layers if layer.spec.name not in self._left_out]
        self._bytes_per_state = STATE_RATIO * sum(layer.state_bytes() for layer in layers)
        if not layers or self._bytes_since_state <= self._bytes_per_state:
            return batch
        self._bytes_since_state = 0
        return batch._replace(state=self._state(layers))

    def _resume(self, manifest: RecordingManifest, step: int) -> None:
        if not isinstance(self._sink, DiskSink):
            raise ResumeError(
                "resume_at_step needs the path of a recording, or a DiskSink with it, not "
                f"{type(self._sink).__name__}"
            )
        states = {name: state for layer in self._layers for name, state in layer.states().items()}
        counts = {name: count for layer in self._layers for name, count in layer.counts().items()}
        resumed = resume(self._sink, manifest, step, states, counts)
        self._annotations.resume(resumed.columns)
        self._examples = ExampleIntake(resumed.examples)
        self._step = self._first_step = step
        self._bytes_since_state = resumed.bytes_since_state
        self._left_out.update(resumed.left_out)

    def _mark_left_out(self, blocks: StepBlocks) -> None:
        """Mark the layers whose rows do not add up to them from this step on."""
        follows = None if self._optimizer.family.scalar else self._optimizer.name
        for layer in self._layers:
            name = layer.spec.name
            if name in blocks.told and name not in self._left_out:
                self._left_out.add(name)
                dropped = [item for item in blocks.dropped if item.layer == name]
                reason = reason_of(self._sampling, dropped, follows)
                self._bytes_per_state = 0
                self._marks.append((name, InexactMark(self._step, reason)))  # as it was asked for
        masked = {item.layer for item in blocks.dropped if item.reason == "rows"}
        if masked and not blocks.blocks and not self._said_empty:
            self._said_empty = True
            _LOGGER.warning(
                "annotate(rows=...) leaves out every row of step %d, so none of it is recorded; "
                "true is for the rows that are kept",
                self._step,
            )

    def _averaged(self) -> None:
        """A backward has ended, and gradients were averaged over ranks."""
        with np.errstate(all="ignore"):
            for layer in self._layers:
                layer.averaged()

    def _mark_other_than_mean(self) -> None:
        """Mark all layers where ranks do not take the plain mean of their gradients."""
        reason = self._replica.not_the_mean()
        if reason is not None and not self._said_not_mean:
            self._said_not_mean = True
            for layer in self._layers:
                self._mark(layer, InexactMark(self._step, reason))

    def _mark(self, layer: _Layer, mark: InexactMark | None) -> None:
        if mark is not None:
            self._bytes_per_state = 0  # the layer's state is no longer kept: look anew
            self._marks.append((layer.spec.name, mark))
            self._unsaid.setdefault(mark, []).append(layer.spec.name)

    def _say_marks(self) -> None:
        """What was found since this was called last; layers with the same mark in one line."""
        for mark, names in self._unsaid.items():
            which = f"layer {names[0]!r} is"
            if len(names) > 1:
                which = f"layers {some_of(list(map(repr, names)))} are"
            _LOGGER.warning("%s inexact from step %d on: %s", which, mark.from_step, mark.reason)
        self._unsaid.clear()

    def _state(self, layers: Sequence[_Layer] | None = None) -> dict[str, np.ndarray]:
        state: dict[str, np.ndarray] = {}
        for layer in self._layers if layers is None else layers:
            for name, (parameter, buffers) in layer.states().items():
                state[name] = _array(parameter)
                for buffer, tensor in buffers.items():
                    state[f"{buffer}:{name}"] = _array(tensor)
        return state

    def __reduce__(self) -> Any:
        raise RecordError(f"a Recorder stays in the process that it was made in; {IN_THE_LOOP}")

    def _check_process(self) -> None:
        """A fork, such as a data loader's worker, has a copy of the recorder, of no effect."""
        if os.getpid() != self._process:
            raise RecordError(
                f"this recorder is that of process {self._process}, and this is process "
                f"{os.getpid()}, such as a worker of a DataLoader, where nothing is recorded; "
                f"{IN_THE_LOOP}"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise RecorderClosedError(
                "this recorder is closed; make a new Recorder with a new path, and annotate "
                "inside its `with` block"
            )


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy(), order="C")


def _program() -> str:
    try:
        return f"dualform {version('dualform')}"
    except PackageNotFoundError:
        return "dualform"
