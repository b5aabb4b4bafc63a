"""Do the recorded rows add up to the gradient?

Freivalds' test with private random vectors u and v, fixed for the run: u'Gv of the gradient at the
step, against the rows' sum of (u.e)(x.v). Of a large gradient each step reads one part, in a
private random order that comes round every `PARTS` steps (docs/decisions/0006-recorder-checks.md
says what this costs and what it can miss). A failed test is confirmed on the whole gradient in
float64 before a layer is called inexact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dualform.record.buffers import dot, gram, host_array, row_dots
from dualform.record.copies import NONE, Copies
from dualform.record.passes import Pass
from dualform.record.watch import GradientWatch

SCREEN = 5e-6
"""Relative difference of the two sides of Freivalds' test above which the whole is compared."""

TOLERANCE = 3e-6
"""Largest |G - sum e x'| / (|E| |X|), Frobenius norms, that float32 backward passes explain."""

MOST_LOST = 5e-5
"""Of |G|, where a float32 sum is measured to lose more than that tolerance: half of the part of
their way that weights may be off by and count as rebuilt."""

_ANOTHER_ORDER = 4.0
"""By how much more backward's own order of adding up may lose than the sum that is measured."""

_EPS = 2.0**-24

_UNDERFLOW = 2.0**-126
"""What a product or a sum below float32's normal numbers may lose, whatever the rows are like."""

_TELLING = 1e-3
"""Relative size of a probe above which a scale can't hide in the screen's tolerance."""

PARTS = 16
"""In how many parts a large gradient is read."""

_LARGE = 65_536
_CHUNK = 4096
_CHUNK_NUMBERS = 16 << 20
_FEW = 16
"""Probes of fewer rows may all be small by chance: they do not estimate a norm."""


class Verdict(NamedTuple):
    """One parameter at one step.

    Attributes:
        took_part: There is a gradient.
        zeroed: The gradient is zero, though backward brought something else.
        scale: See `LedgerRow.scale`.
        probe: u'Gv for a weight, u.g for a bias, of the gradient at the step, float64: read, but
            of a weight that is read in parts, by the rows.
        fault: What is wrong, or None: "mismatch", "rounded", "clipped", "edited" or "not finite".
    """

    took_part: bool
    zeroed: bool = False
    scale: float = 1.0
    probe: float = 0.0
    fault: str | None = None

    @property
    def counts(self) -> bool:
        """What backward brought reaches the step."""
        return self.took_part and not self.zeroed


class Sides:
    """The rows' side of the test, for a layer's weight and bias.

    Args:
        passes: Those committed for the step.
        u: float32 [d_out].
        v: float32 [d_in].
        part: The gradient's rows that this step reads.

    Attributes:
        part: As given.
        weight: -sum (u.e)(x.v).
        of_part: The same for `part` alone.
        bias: -sum u.e.
        weight_size: An estimate of |E| |X|, Frobenius norms: the scale of rounding errors.
        part_size: The same for `part` alone.
        bias_size: An estimate of |E| sqrt(rows).
        rows: How many there are.
    """

    def __init__(self, passes: Sequence[Pass], u: np.ndarray, v: np.ndarray, part: slice) -> None:
        self.passes = passes
        self.part = part
        self.weight = self.bias = self.of_part = 0.0
        keys = values = part_values = rows = 0.0
        for item in passes:
            assert item.key is not None
            assert item.value is not None
            key, value = item.key, item.value
            sums = np.empty((4, item.rows))
            key.dots((v, slice(None), sums[0]))
            value.dots((u, slice(None), sums[1]), (u, part, sums[2]))
            sums[3] = 1.0
            (xx, xe, xp, _), (_, ee, _, e), (_, _, pp, _), (_, _, _, ones) = gram(sums)
            if item.rows < _FEW:
                xx, ee = max(xx, key.square()), max(ee, value.square())
            self.weight -= xe
            self.of_part -= xp
            self.bias -= e
            keys += xx
            values += ee
            part_values += pp
            rows += ones
        self.weight_size = math.sqrt(values * keys)
        self.part_size = math.sqrt(part_values * keys)
        self.bias_size = math.sqrt(values * rows)
        self.rows = sum(item.rows for item in passes)


class GradientCheck:
    """Freivalds' test for one layer.

    Args:
        d_in: Length of a key.
        d_out: Length of a value.
        random: A generator of the recorder's own, so that training's random state stays as it is.
        weight_2d: A weight, its gradient or its buffer as [d_out, d_in].
        copies: Bring gradients from a device.

    Attributes:
        u: float32 [d_out], on the host: of mean square 1, no element near zero.
        v: float32 [d_in], likewise.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        random: np.random.Generator,
        weight_2d: Callable[[torch.Tensor], torch.Tensor],
        copies: Copies = NONE,
    ) -> None:
        self._copies = copies
        self.u, self.v = _direction(random, d_out), _direction(random, d_in)
        self._u64 = self.u.astype(np.float64)
        self._random = random
        self._weight_2d = weight_2d
        parts = PARTS if d_in * d_out >= _LARGE and d_out >= PARTS else 1
        bounds = [d_out * part // parts for part in range(parts + 1)]
        self._parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._order: list[int] = []
        self._part = self._next_part()

    def sides(self, passes: Sequence[Pass]) -> Sides:
        """What the rows say; the step's last word, as the next reads another part."""
        found = Sides(passes, self.u, self.v, self._part)
        self._part = self._next_part()
        return found

    def look_ahead(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """These gradients are about to be tested."""
        if weight is not None and self._copies.takes(weight):
            self._copies.look_ahead(self._weight_2d(weight).detach()[self._part])
        if bias is not None:
            self._copies.look_ahead(bias.detach())

    def read(self, grad: torch.Tensor) -> float:
        """u'Gv of the part of a weight's gradient that this step reads; of a bias's, u.g."""
        if grad.dim() == 1:
            return dot(self._host(grad).astype(np.float64), self._u64)
        return self._read(self._weight_2d(grad), self._part)

    def _read(self, matrix: torch.Tensor, part: slice) -> float:
        host = self._host(matrix, part)
        reduced = np.empty(len(host))
        row_dots(host, self.v, reduced)
        return dot(reduced, self._u64[part])

    def _host(self, tensor: torch.Tensor, rows: slice = slice(None)) -> np.ndarray:
        host = host_array(tensor)
        if host is not None and not (self._copies.sending and self._copies.takes(tensor)):
            return host[rows]
        return self._copies.read(tensor.detach()[rows])

    def _next_part(self) -> slice:
        if not self._order:
            self._order = self._random.permutation(len(self._parts)).tolist()
        return self._parts[self._order.pop()]

    def probe(self, tensor: torch.Tensor) -> tuple[float, float]:
        """u'Tv for a weight, u.t for a bias; and the tensor's norm, for a weight an estimate."""
        host = self._host(tensor if tensor.dim() == 1 else self._weight_2d(tensor))
        if host.ndim == 2:
            reduced = np.empty(len(host))
            row_dots(host, self.v, reduced)
        else:
            reduced = host.astype(np.float64)
        square = dot(reduced, reduced)
        if host.ndim == 2 and len(host) < _FEW:
            square = max(square, _square(host))
        return dot(reduced, self._u64), math.sqrt(square)

    def blindness(self, tensor: torch.Tensor) -> float:
        """By what `probe` underestimates a tensor's norm, at least 1: much where its rows, and so
        most likely those that it was made of, have one direction that lies across v. Rounding has
        all directions, and is as large as the true norm makes it.
        """
        _, estimate = self.probe(tensor)
        norm = float(tensor.detach().double().norm())
        return max(1.0, norm / estimate) if math.isfinite(norm) and estimate else 1.0

    def weight(self, grad: torch.Tensor, watch: GradientWatch, sides: Sides) -> Verdict:
        """Test the weight's gradient, float32, at the step.

        Args:
            grad: As the optimizer finds it, the weight's shape.
            watch: What backward left of it.
            sides: What the rows say.
        """
        total, size = sides.of_part, sides.part_size
        matrix = self._weight_2d(grad)
        probe = self._read(matrix, sides.part)
        # Of a part whose rows are zero, or cancel, the test tells no scale; and autograd's count
        # misses what torch.amp.GradScaler does to a gradient.
        tells = abs(total) > _TELLING * size or sides.weight_size == 0.0
        if abs(probe - total) <= SCREEN * size and tells and watch.untouched(grad):
            return Verdict(True, False, 1.0, self._whole(probe, sides.weight))
        # Rows that add up to zero (dead units; keys that are all zero) leave nothing to zero, and
        # clipping a zero gradient touches it: the bias's rows still count.
        if probe == 0.0 and sides.weight != 0.0 and watch.zeroed(grad):
            return Verdict(True, zeroed=True, scale=0.0)
        if not math.isfinite(probe):
            return Verdict(True, fault="not finite")
        # Scaled, or edited through `.data`, which autograd does not count, or wrong.
        scale = watch.scale(grad)
        factor = scale.factor
        if math.isinf(factor):
            return Verdict(True, fault="not finite")
        if math.isnan(factor):  # the sample was zero: take the factor from all rows
            factor = _regression(matrix, weight_sum(sides.passes, matrix.shape).total)
        if not scale.uniform:
            what = "clipped" if scale.plateau else "edited"
            return Verdict(True, False, factor, factor * sides.weight, what)
        fault = None
        if not abs(probe - factor * total) <= SCREEN * abs(factor) * size:
            fault = weight_sum(sides.passes, matrix.shape).fault(matrix, factor)
        return Verdict(True, False, factor, self._whole(probe, factor * sides.weight), fault)

    def _whole(self, probe: float, by_rows: float) -> float:
        """The probe of the whole gradient: what was read, where that was all of it."""
        return probe if len(self._parts) == 1 else by_rows

    def bias(self, grad: torch.Tensor, sides: Sides, scale: float) -> Verdict:
        """Test the bias's gradient, float32 [d_out], at the step.

        Args:
            grad: As the optimizer finds it.
            sides: What the rows say.
            scale: The weight's; tried first, since nearly everything scales both alike.
        """
        probe = dot(self._host(grad).astype(np.float64), self._u64)
        if abs(probe - scale * sides.bias) <= SCREEN * abs(scale) * sides.bias_size:
            return Verdict(True, False, scale, probe)
        if not math.isfinite(probe):
            return Verdict(True, fault="not finite")
        if probe == 0.0 and not grad.any():
            return Verdict(True, zeroed=True, scale=0.0)
        rows = bias_sum(sides.passes, grad.shape)
        for factor in (scale, 1.0, _regression(grad, rows.total)):
            fault = rows.fault(grad, factor)
            if fault != "mismatch":
                return Verdict(True, False, factor, probe, fault)
        magnitude = grad.detach().abs()
        plateau = int((magnitude == magnitude.max()).sum()) > 1
        # No factor explains it; the weight's, which was measured, is the likeliest: under autocast
        # the bias's sum is rounded, and its clipping is the weight's all the same.
        return Verdict(True, False, scale, probe, "clipped" if plateau else "mismatch")


def _direction(random: np.random.Generator, length: int) -> np.ndarray:
    """Random signs times 0.5 to 1.5: no element is so small that what is wrong with one unit or one
    input could hide behind it. Scaled to a mean square of 1."""
    direction: np.ndarray = random.uniform(0.5, 1.5, length) * random.choice((-1.0, 1.0), length)
    return np.asarray(direction / math.sqrt(13 / 12), np.float32)


def _square(matrix: np.ndarray) -> float:
    """|matrix|^2, Frobenius norm, in float64 in the calling thread."""
    return float(np.einsum("ij,ij", matrix, matrix, dtype=np.float64))


class Sum(NamedTuple):
    """What backward should have accumulated.

    Attributes:
        total: Of all rows, float64.
        norms: What a float32 sum of them is rounded relative to.
        rows: How many there are.
        float32: The same sum as float32 has it, made when it is asked for.
    """

    total: torch.Tensor
    norms: float
    rows: int
    float32: Callable[[], torch.Tensor]

    def fault(self, grad: torch.Tensor, factor: float) -> str | None:
        """Of a gradient that should be the sum times the factor, as float32 has it."""
        error = float((grad.detach().double().cpu() - factor * self.total).norm())
        lost = 2 * self.rows * _UNDERFLOW * math.sqrt(grad.numel())  # a product and a sum each
        return self.fault_of(error - max(1.0, abs(factor)) * lost, abs(factor))

    def fault_of(self, error: float, factor: float = 1.0) -> str | None:
        """Of a float32 sum, times the factor, that is so far off; Frobenius norm.

        Rows that are much alike are rounded alike, and narrow layers add them up one by one. Where
        the tolerance is exceeded, though by no more than that can come to, it is measured what a
        float32 sum of these very rows loses.
        """
        scale = factor * self.norms
        if error <= TOLERANCE * scale:
            return None
        if not error <= self.rows * _EPS * scale:
            return "mismatch"
        loses = float((self.float32().double() - self.total).norm())
        if not error <= factor * _ANOTHER_ORDER * loses:
            return "mismatch"
        way = factor * float(self.total.norm())
        return None if error <= MOST_LOST * way else "rounded"


def weight_sum(passes: Sequence[Pass], shape: torch.Size) -> Sum:
    """-sum e x'."""

    def add(dtype: torch.dtype) -> torch.Tensor:
        found = torch.zeros(shape, dtype=dtype, device="cpu")
        for key, value in _chunks(passes, dtype):
            found -= value.T @ key
        return found

    return _of_all(add, _weight_norms(passes), passes)


def bias_sum(passes: Sequence[Pass], shape: torch.Size) -> Sum:
    """-sum e."""

    def add(dtype: torch.dtype) -> torch.Tensor:
        found = torch.zeros(shape, dtype=dtype, device="cpu")
        for _, value in _chunks(passes, dtype):
            found -= value.sum(0)
        return found

    return _of_all(add, _bias_norms(passes), passes)


def _of_all(
    add: Callable[[torch.dtype], torch.Tensor], norms: float, passes: Sequence[Pass]
) -> Sum:
    rows = sum(item.rows for item in passes)
    return Sum(add(torch.float64), norms, rows, lambda: add(torch.float32))


def _weight_norms(passes: Sequence[Pass]) -> float:
    """|E| |X|."""
    e = x = 0.0
    for key, value in _chunks(passes):
        e += float((value * value).sum())
        x += float((key * key).sum())
    return math.sqrt(e * x)


def _bias_norms(passes: Sequence[Pass]) -> float:
    """|E| sqrt(rows)."""
    e = sum(float((value * value).sum()) for _, value in _chunks(passes))
    return math.sqrt(e * sum(item.rows for item in passes))


def _chunks(
    passes: Sequence[Pass], dtype: torch.dtype = torch.float64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values in turn; in float32 as many at once as backward multiplies, if they fit."""
    for item in passes:
        assert item.key is not None
        assert item.value is not None
        chunk = max(1, _CHUNK_NUMBERS // (item.key.width + item.value.width))
        if dtype is torch.float64:
            chunk = min(_CHUNK, chunk)
        for start in range(0, item.rows, chunk):
            rows = slice(start, start + chunk)
            key, value = (torch.from_numpy(side.wide(rows)) for side in (item.key, item.value))
            yield key.to(dtype), value.to(dtype)


def _regression(grad: torch.Tensor, rows: torch.Tensor) -> float:
    """The factor f for which f * rows is closest to the gradient."""
    square = float((rows * rows).sum())
    return float((grad.detach().double().cpu() * rows).sum()) / square if square else 1.0
