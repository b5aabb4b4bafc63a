"""A model trained by several processes (DistributedDataParallel): each records the rows of its own.

At the end of a backward every rank's gradient becomes the mean of all ranks'. So a rank's rows add
up to what its own backwards brought, before the mean was taken: that is tested, without a word to
the other ranks. The step's gradient is the mean of what all ranks' rows add up to, times what was
done to it since, such as clipping: that factor is measured on the mean
(docs/decisions/0027-ranks.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dualform.record.check import SCREEN, TOLERANCE, Sum, Verdict
from dualform.record.errors import LayerSelectionError, RecordingExistsError
from dualform.record.watch import GradientWatch
from dualform.store.ranks import Rank, rank_folder
from dualform.store.recording_format import MANIFEST

_PLAIN = ("allreduce_hook",)
"""Communication hooks that take the plain mean."""

_SHARDED = (
    "its weights lie in pieces on several processes ({what}): no process has a layer's whole "
    "gradient, so rows can't be held against it. Record the same training under "
    "DistributedDataParallel, or in one process; where disk is what is lacking, train there a "
    "second time and ask by replay (dualform.replay), which stores no rows; or keep each "
    "process's keys by a forward hook of your own, which is enough for attention weights"
)


class Replica:
    """One process's part in a data-parallel training.

    Args:
        model: As the recorder was given it: DistributedDataParallel, compiled or not.

    Attributes:
        rank: Which of how many processes; None where there is one.

    Raises:
        LayerSelectionError: Weights are sharded (FSDP, tensor parallel).
    """

    def __init__(self, model: nn.Module) -> None:
        self._parallel = _parallel(model)
        self.rank: Rank | None = None
        if self._parallel is not None:
            group: Any = self._parallel.process_group
            world = dist.get_world_size(group)
            self.rank = None if world == 1 else Rank(dist.get_rank(group), world)
        what = _sharded(model)
        if what is not None:
            raise LayerSelectionError(f"this model can't be recorded: {_SHARDED.format(what=what)}")

    @property
    def first(self) -> bool:
        """It speaks for all."""
        return self.rank is None or self.rank.rank == 0

    @property
    def share(self) -> float:
        """What part of the sum over all ranks' rows their mean is."""
        return 1.0 if self.rank is None else 1 / self.rank.world

    def path(self, path: str | os.PathLike[str]) -> Path:
        """Where this process records.

        Raises:
            RecordingExistsError: A run in one process lies there, or one in several where this
                is one.
        """
        if self.rank is None:
            return Path(path)
        if (Path(path) / MANIFEST).exists():
            raise RecordingExistsError(
                f"{path} holds the recording of a run in one process; choose another path"
            )
        return rank_folder(Path(path), self.rank.rank)

    def not_the_mean(self) -> str | None:
        """Why gradients are not the ranks' plain mean; None where they are."""
        hooks = getattr(self._parallel, "_comm_hooks", ())
        names = [getattr(hook, "__name__", str(hook)) for hook, _ in hooks]
        strange = [name for name in names if name not in _PLAIN]
        if self.rank is None or not strange:
            return None
        return (
            f"a communication hook ({strange[0]}) is in the place of the plain mean of the ranks' "
            "gradients, so their rows need not add up to it"
        )


class RankWatch(GradientWatch):
    """Watches a gradient that is averaged over ranks at the end of backward.

    The sample is of the mean, as soon as there is one.

    Args:
        shape: As `GradientWatch`'s, and `part`.
        probe: The product with the check's private vectors that the rows are held against.

    Attributes:
        brought: The probe of what this rank's own backwards added, since the step's begin or since
            it was zeroed.
    """

    def __init__(
        self,
        shape: torch.Size,
        probe: Callable[[torch.Tensor], float],
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(shape, part)
        self._probe = probe
        self.brought = self._before = 0.0
        self._norm: float | None = None
        self._met = False

    def begin(self, step: bool) -> None:
        self.brought = 0.0
        self._met = self._met and not step

    def before(self, grad: torch.Tensor | None) -> None:
        self._before = 0.0 if grad is None else self._probe(grad)

    def unexplained(self, grad: torch.Tensor) -> bool:
        # Other ranks may have had rows where this one had none.
        return not self._met and super().unexplained(grad)

    def accumulated(self, grad: torch.Tensor) -> None:
        super().accumulated(grad)
        now = self._probe(grad)
        self.brought += now - self._before
        self._before = now

    def averaged(self, grad: torch.Tensor | None) -> None:
        self._met = True
        if grad is not None:
            super().accumulated(grad)
            # Where the sampled elements are zero, as of ids that nobody looked up, the norm tells.
            self._norm = None if self.sampled(grad) else self._norm_of(grad)

    def factor(self, grad: torch.Tensor) -> tuple[float, str | None]:
        """What the mean was multiplied by since, and what is wrong, as `Verdict.fault`."""
        scale = self.scale(grad)
        if math.isinf(scale.factor):
            return 1.0, "not finite"
        if math.isnan(scale.factor):
            now, then = self._norm_of(grad), self._norm
            if then is None or (then == 0.0) != (now == 0.0):
                return 1.0, "edited"
            return (now / then if then else 1.0), None if math.isfinite(now) else "not finite"
        if scale.uniform:
            return scale.factor, None
        return scale.factor, "clipped" if scale.plateau else "edited"

    def _norm_of(self, grad: torch.Tensor) -> float:
        watched = grad if self._part is None else self._part(grad)
        return float(torch.linalg.vector_norm(watched.detach(), dtype=torch.float64))


def rank_verdict(
    grad: torch.Tensor, watch: RankWatch, probe: float, size: float, rows: Callable[[], Sum]
) -> Verdict:
    """Test what this rank's backwards brought to a gradient against its rows, and measure what was
    done to the mean.

    Args:
        grad: At the step.
        watch: What backward left, of this rank and of all.
        probe: Of what this rank's rows add up to.
        size: What its rounding is relative to, an estimate.
        rows: Their sum, for where that is too little.
    """
    if watch.brought != 0.0 and watch.zeroed(grad):
        return Verdict(True, zeroed=True, scale=0.0)
    factor, fault = watch.factor(grad)
    off = abs(watch.brought - probe)
    if fault is None and not off <= SCREEN * size:
        # A probe may be by so much further off than the norm is.
        fault = rows().fault_of(off * TOLERANCE / SCREEN)
        fault = fault if math.isfinite(watch.brought) else "not finite"
    return Verdict(True, False, factor, factor * probe, fault)


def _parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that averages the model's gradients."""
    found: Any = model
    while found is not None and not isinstance(found, DistributedDataParallel):
        found = getattr(found, "_orig_mod", None)
    return found


def _sharded(model: nn.Module) -> str | None:
    """By what a model's weights are cut in pieces, without importing what does."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in ("FullyShardedDataParallel", "FSDPModule"):
                return "FSDP"
    tensors = (type(parameter).__name__ for parameter in model.parameters())
    return "DTensor" if "DTensor" in tensors else None
