"""Recording under transformers' Trainer: one callback.

Trainer tells callbacks everything but its batches, and nothing when `train()` raises. So the
callback finds the trainer that it was given to, and stands in three of its methods' places, on that
trainer alone: `train`, to close the recorder whatever happens; `get_train_dataloader`, to keep
columns that the model does not take; `training_step`, to annotate a batch before the model sees it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from dualform.record.errors import RecordError
from dualform.record.integrations.batches import DEFAULT, BatchColumns, Rows, Wanted, per_row
from dualform.record.recorder import Recorder

_COLUMNS = "dualform_columns"
"""Where a batch carries what the model does not take, from the collator to the training step."""

_OFTEN_LABELS = ("label", "label_ids", "labels")


class RecorderCallback(TrainerCallback):  # type: ignore[misc]
    """Records what a Trainer trains; closed at the end, and when `train()` raises.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[RecorderCallback("runs/a")])
        trainer.train()

    Args:
        path: As `Recorder`'s.
        layers: As `Recorder`'s.
        annotate: Columns of the batch, or of the data set where the model does not take them; or
            {column: name in the batch}. Labels of -100 are null. `example`, an
            id, is taken wherever it is there. The default takes `labels` where they fit the rows.
        resume_at_step: As `Recorder`'s, with `trainer.train(resume_from_checkpoint=...)`.
        rows: Called with each batch: which of its rows are recorded, as `Recorder.annotate` takes
            it, such as `lambda batch: batch["attention_mask"].bool()`. None for all.
        options: Other options of `Recorder`, by name, such as {"every": 10}.

    Attributes:
        recorder: While training runs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[str] | None = None,
        annotate: Wanted = DEFAULT,
        resume_at_step: int | None = None,
        *,
        rows: Rows | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self._path = path
        self._layers = layers
        self._resume_at_step = resume_at_step
        self._columns = BatchColumns(annotate, rows)
        self._options = dict(options or {})
        self._trainer: Any = None

    @property
    def state_key(self) -> str:
        """What Lightning's Trainer asks first of its own callbacks."""
        raise RecordError(
            "this RecorderCallback is transformers'; Lightning's Trainer takes that of "
            "dualform.record.integrations.lightning"
        )

    def on_exception(self, *_: Any, **__: Any) -> None:
        """What it calls then."""

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer is made."""
        self._meet(_calling_trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Model and optimizer are as training finds them, a checkpoint's where it resumes."""
        if self._trainer is None:  # add_callback, after the trainer was made
            self._meet(_calling_trainer())
        self.close()
        model = given["model"]
        wrapped = self._trainer.model_wrapped  # where several processes train it
        parallel = isinstance(wrapped, DistributedDataParallel)
        self.recorder = Recorder(
            wrapped if parallel else model,
            given["optimizer"],
            self._path,
            layers=self._layers,
            steps=state.max_steps - state.global_step if state.max_steps > 0 else None,
            resume_at_step=self._resume_at_step,
            **self._options,
        )
        self._before_best = model.register_load_state_dict_pre_hook(
            lambda *_: self._close_if(control.should_training_stop or _is_over(state))
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training is over."""
        self.close()

    def close(self) -> None:
        """Close the recorder, if there is one. Twice does no harm."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            self._before_best.remove()
            recorder.close()

    def _close_if(self, over: bool) -> None:
        """Before the best checkpoint is loaded (load_best_model_at_end), which is not what the last
        step left."""
        if over:
            self.close()

    def _meet(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.train = self._closing(trainer.train)
        trainer.get_train_dataloader = self._keeping_columns(trainer, trainer.get_train_dataloader)
        trainer.training_step = self._annotating(trainer.training_step)

    def _closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def closing(*args: Any, **kwargs: Any) -> Any:
            try:
                found = train(*args, **kwargs)
            except BaseException as error:
                recorder, self.recorder = self.recorder, None
                if recorder is not None:
                    self._before_best.remove()
                    recorder.__exit__(type(error), error, error.__traceback__)
                raise
            self.close()
            return found

        return closing

    def _annotating(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def annotating(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            extra = inputs.pop(_COLUMNS, None)
            if self.recorder is not None:
                self._columns.annotate(self.recorder, inputs, {} if extra is None else extra.found)
            return step(model, inputs, *args, **kwargs)

        return annotating

    def _keeping_columns(self, trainer: Any, loader: Callable[[], Any]) -> Callable[[], Any]:
        """The loader, with a collator that sets the wanted columns aside before it collates what
        the model takes; the trainer itself would have dropped them."""

        @functools.wraps(loader)
        def keeping() -> Any:
            taken = _taken(trainer)
            aside = self._columns.needed - taken
            collator, remove = trainer.data_collator, trainer.args.remove_unused_columns
            trainer.data_collator = _SettingAside(collator, aside, taken if remove else None)
            trainer.args.remove_unused_columns = False
            try:
                return loader()
            finally:
                trainer.data_collator, trainer.args.remove_unused_columns = collator, remove

        return keeping


class _Aside:
    """Columns on their way past whatever moves and splits a batch's tensors."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found


class _SettingAside:
    """A collator that takes columns out of the examples, and collates the others by another.

    Args:
        collator: The trainer's own.
        aside: Names of the columns.
        taken: Names that the model takes: no other is collated. None for all.
    """

    def __init__(self, collator: Callable[[Any], Any], aside: set[str], taken: set[str] | None):
        self._collator = collator
        self._aside = aside
        self._taken = taken

    def __call__(self, examples: Sequence[Any]) -> Any:
        if not all(isinstance(example, Mapping) for example in examples):
            return self._collator(examples)
        there = [name for name in sorted(self._aside) if all(name in e for e in examples)]
        values = {name: [example[name] for example in examples] for name in there}
        batch = self._collator(
            [
                {
                    name: value
                    for name, value in example.items()
                    if name not in self._aside and (self._taken is None or name in self._taken)
                }
                for example in examples
            ]
        )
        if values:
            attention = batch.get("attention_mask")
            columns = {name: per_row(found, attention) for name, found in values.items()}
            batch[_COLUMNS] = _Aside(columns)
        return batch


def _taken(trainer: Any) -> set[str]:
    """Names that the model's forward takes, and what the trainer takes for labels."""
    model = trainer.model
    if hasattr(model, "get_base_model"):  # PEFT's hand on whatever they are given
        model = model.get_base_model()
    parameters = inspect.signature(model.forward).parameters
    return {*parameters, *_OFTEN_LABELS, *(trainer.label_names or ())}


def _is_over(state: Any) -> bool:
    return bool(state.max_steps > 0 and state.global_step >= state.max_steps)


def _calling_trainer() -> Any:
    """The trainer whose event this is: the nearest among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise RecordError(
        "RecorderCallback works in transformers' Trainer alone: Trainer(..., "
        "callbacks=[RecorderCallback(path)]); in a loop of your own use dualform.record.Recorder"
    )
