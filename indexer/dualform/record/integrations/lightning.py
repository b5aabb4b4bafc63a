"""Recording under Lightning's Trainer: one callback."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dualform.record.errors import OptimizerError, RecordError
from dualform.record.integrations.batches import DEFAULT, BatchColumns, Rows, Wanted
from dualform.record.recorder import Recorder

try:
    from lightning.pytorch import Callback
except ImportError:  # the same framework under its older name
    from pytorch_lightning import Callback


class RecorderCallback(Callback):  # type: ignore[misc]
    """Records what a Lightning Trainer trains; closed at the end, and when `fit()` raises.

        trainer = lightning.Trainer(max_epochs=3, callbacks=[RecorderCallback("runs/a")])
        trainer.fit(module, loader)

    Layers are called as in the module's `named_modules()`.

    Args:
        path: As `Recorder`'s.
        layers: As `Recorder`'s.
        annotate: Columns of the batch where it is a mapping; or {column: place in the batch}, a key
            or an index: {"label": 1}. Labels of -100 are null. `example`, an
            id, is taken wherever it is there. The default takes `labels`
            where they are there and fit the rows.
        resume_at_step: As `Recorder`'s, with `trainer.fit(..., ckpt_path=...)`.
        optimizer: Which of several optimizers' steps are recorded, by its place.
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
        optimizer: int | None = None,
        rows: Rows | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self._path = path
        self._layers = layers
        self._resume_at_step = resume_at_step
        self._columns = BatchColumns(annotate, rows)
        self._which = optimizer
        self._options = dict(options or {})

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """What transformers' Trainer calls first of its own callbacks."""
        raise RecordError(
            "this RecorderCallback is Lightning's; transformers' Trainer takes that of "
            "dualform.record.integrations.transformers"
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers are as training finds them, a checkpoint's where it resumes."""
        self.close()
        planned = trainer.estimated_stepping_batches
        left = planned - trainer.global_step
        wrapped = trainer.strategy.model  # where several processes train it
        parallel = isinstance(wrapped, DistributedDataParallel)
        self.recorder = Recorder(
            wrapped if parallel else pl_module,
            self._optimizer(trainer.optimizers),
            self._path,
            layers=self._layers,
            steps=int(left) if 0 < left < float("inf") else None,
            resume_at_step=self._resume_at_step,
            **self._options,
        )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Before the module sees a batch."""
        if self.recorder is not None:
            self._columns.annotate(self.recorder, batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """`fit()` is about to raise."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever happened."""
        self.close()

    def close(self) -> None:
        """Close the recorder, if there is one. Twice does no harm."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def _optimizer(self, optimizers: Sequence[Any]) -> Any:
        if self._which is None and len(optimizers) == 1:
            return optimizers[0]
        if self._which is not None and 0 <= self._which < len(optimizers):
            return optimizers[self._which]
        raise OptimizerError(
            f"the module has {len(optimizers)} optimizers and a recorder follows one: say which "
            f"with RecorderCallback(..., optimizer=0) up to {len(optimizers) - 1}, with a callback "
            "and a path for each"
        )
