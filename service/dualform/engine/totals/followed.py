"""The parts of a layer's weights where a row has no single coefficient: Adam and its kin.

The layer is followed through its training, each part of the rows with its own gradient under the
whole run's preconditioner (`dualform.optimizers`, docs/dual-form.md). One pass over the steps
answers every query of a filter or grouping: its parts are kept, up to some bytes, for the next.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.errors import ResourceExhaustedError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.states import State, product
from dualform.engine.totals.steps import StepRows, steps_in_order
from dualform.optimizers import Affine, LayerRun, followed_bytes, layer_state
from dualform.store.grouping import Grouping
from dualform.store.index import IndexLayer
from dualform.store.ledger import Ledger, LedgerRow

KEPT_BYTES = 256 << 20
"""Parts of so many bytes are kept for questions that come again."""

FOLLOWED_BYTES = 2 << 30
"""Parts that need more memory than this while they are followed are refused."""

_WAIT_SECONDS = 0.05
"""Who waits for another's parts asks so often whether its own caller gave up."""


@dataclass(frozen=True)
class Followed:
    """A layer's weights after some step, in parts.

    Attributes:
        initial: What the state at the start became.
        parts: What each part's rows became.
    """

    initial: Affine
    parts: tuple[Affine, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.initial.nbytes + sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Way:
    """A layer on its way through training, before some step.

    Attributes:
        run: The layer. Between two machines it has no ledger.
        rows: Rows of that step that were met already; None where there are none.
        codes: Of these rows, as `follow` takes them.
    """

    run: LayerRun
    rows: StepRows | None = None
    codes: np.ndarray | None = None


Elsewhere = Callable[[Way, int, int, bool], Way]
"""Takes a layer whose rows are not here from one step to another, with its groups apart or not."""


def follow(
    layer: Layer,
    ledger: Ledger,
    state: State,
    start: int,
    end: int,
    codes: np.ndarray,
    parts: int,
    stop: Stop | None,
) -> Followed:
    """Follow a layer from a state to a step.

    Args:
        layer: Whose rows.
        ledger: What the optimizer did.
        state: The layer's, after `start` steps.
        start, end: Half-open range of the steps to take.
        codes: Integer [total], by position: the part of each row, -1 for none of them. Every row
            counts for the preconditioner.
        parts: How many parts there are.
        stop: Asked at every step.
    """
    way = set_out(layer.manifest, ledger, state, start, parts)
    way = follow_on(layer, way, start, end, end, codes, parts, stop)
    return arrived(way, parts)


def set_out(layer: IndexLayer, ledger: Ledger, state: State, start: int, parts: int) -> Way:
    """A layer at a state; arguments as for `follow`."""
    weight, bias = ledgers_of(layer, ledger)
    states = layer_state(state, ledger.family, layer.weight, layer.bias)
    return Way(LayerRun(ledger.family, weight, bias, states, start, parts))


def ledgers_of(
    layer: IndexLayer, ledger: Ledger
) -> tuple[Sequence[LedgerRow], Sequence[LedgerRow] | None]:
    """Of its weight and its bias."""
    bias = None if layer.bias is None else ledger.parameters[layer.bias]
    return ledger.parameters[layer.weight], bias


def follow_on(
    layer: Layer,
    way: Way,
    first: int,
    end: int,
    last: int,
    codes: np.ndarray,
    parts: int,
    stop: Stop | None,
) -> Way:
    """Take a layer some of its way.

    Args:
        layer: With all rows of these steps that `way` has not.
        way: Before step `first`; it is used up.
        first, end: Half-open range of the steps to take.
        last: Before which step it is to arrive; of later ones no rows are wanted.
        codes, parts, stop: As for `follow`.
    """
    run, waiting = way.run, way
    for rows in steps_in_order(layer, first, min(end + 1, last), stop):
        of_rows = codes[rows.positions]
        if rows.step == first and waiting.rows is not None and waiting.codes is not None:
            rows = rows.after(waiting.rows)
            of_rows = np.concatenate([waiting.codes, of_rows])
        waiting = Way(run)
        if rows.step == end:
            waiting = Way(run, rows, of_rows)
            break
        run.take(rows.step, rows.keys, rows.values, _which(of_rows, parts))
    run.advance(end)
    return waiting


def arrived(way: Way, parts: int) -> Followed:
    """What a layer has become."""
    return Followed(way.run.initial(), tuple(way.run.part(number) for number in range(parts)))


def _which(codes: np.ndarray, parts: int) -> list[slice | torch.Tensor | None]:
    """For each part, which of a step's rows it has."""
    found: list[slice | torch.Tensor | None] = [None] * parts
    for code in np.unique(codes).tolist():
        if code >= 0:
            places = np.flatnonzero(codes == code)
            found[code] = slice(None) if len(places) == len(codes) else torch.from_numpy(places)
    return found


def part_codes(selected: np.ndarray, grouping: Grouping | None) -> tuple[np.ndarray, int]:
    """The part of each row, and how many parts there are.

    Args:
        selected: bool [total], by position.
        grouping: Groups to keep apart, or None for a single part.
    """
    if grouping is None:
        return np.where(selected, np.int32(0), np.int32(-1)), 1
    return np.where(selected, grouping.codes, np.int32(-1)), len(grouping.values)


def affine(state: Mapping[str, torch.Tensor], layer: IndexLayer, prefix: str = "") -> Affine:
    """A stored weight and bias, under names with a prefix, as a part."""
    bias = None if layer.bias is None else state[prefix + layer.bias].double()
    return Affine(state[prefix + layer.weight].double(), bias)


def outputs_of(part: Affine, queries: torch.Tensor) -> np.ndarray:
    """What a part adds to outputs: float64 [n, d_out].

    Args:
        part: Its weight and bias.
        queries: float32 [n, d_in].
    """
    out = product(queries.double(), part.weight)
    return np.asarray((out if part.bias is None else out + part.bias).numpy())


class FollowedParts:
    """The parts that questions asked for, made once; thread-safe.

    Who asks for parts that another thread is making waits for them.

    Args:
        ledger: What the optimizer did.
        most_bytes: How much is kept; the oldest goes first.
    """

    def __init__(self, ledger: Ledger, most_bytes: int = KEPT_BYTES) -> None:
        self._ledger = ledger
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Followed] = OrderedDict()
        self._making: dict[_Key, Future[Followed | None]] = {}

    def find(
        self,
        layer: Layer,
        state: State,
        start: int,
        end: int,
        selected: np.ndarray,
        grouping: Grouping | None,
        stop: Stop | None,
        elsewhere: Elsewhere | None = None,
        about: bytes = b"",
    ) -> Followed:
        """The parts of some rows; arguments as for `follow` and `part_codes`.

        Of rows that are not here `about` says which, and `elsewhere` follows the layer.
        """
        groups = 1 if grouping is None else len(grouping.values)

        def make() -> Followed:
            if elsewhere is not None:
                way = set_out(layer.manifest, self._ledger, state, start, groups)
                way = elsewhere(way, start, end, grouping is not None)
                way.run.go_on(*ledgers_of(layer.manifest, self._ledger))
                way.run.advance(end)
                return arrived(way, groups)
            codes, parts = part_codes(selected, grouping)
            return follow(layer, self._ledger, state, start, end, codes, parts, stop)

        needed = followed_bytes(self._ledger.family, layer.d_in * layer.d_out, groups)
        if needed > FOLLOWED_BYTES:
            raise ResourceExhaustedError(
                f"{groups:,} groups of layer {layer.name!r} need {needed / 2**30:,.1f} GiB to be "
                f"followed through training; at most {FOLLOWED_BYTES / 2**30:g} GiB are taken: "
                "group by a column with fewer values, or ask for a filter's rows at a time",
                field="group_by",
            )
        which = about if elsewhere is not None else _digest(selected, grouping)
        key = (layer.name, start, end, groups, which)
        return self._once(key, stop, make)

    def _once(self, key: _Key, stop: Stop | None, make: Callable[[], Followed]) -> Followed:
        """What is kept under a key, what another thread is about to make, or what `make` gives."""
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
                theirs = self._making.get(key)
                if theirs is None:
                    ours = self._making[key] = Future()
                    break
            found = _wait(theirs, stop)
            if found is not None:
                return found
        made: Followed | None = None
        try:
            made = make()
        finally:
            with self._lock:
                del self._making[key]
                if made is not None:
                    self._keep(key, made)
            ours.set_result(made)  # None: given up or failed; one of those who wait tries itself
        return made

    def _keep(self, key: _Key, made: Followed) -> None:
        self._kept[key] = made
        while sum(kept.nbytes for kept in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)


_Key = tuple[str, int, int, int, bytes]


def _wait(theirs: Future[Followed | None], stop: Stop | None) -> Followed | None:
    """What another thread makes; None where it gave up.

    Raises:
        CancelledError: `stop` is true.
    """
    while not wait([theirs], _WAIT_SECONDS).done:
        check_stop(stop)
    return theirs.result()


def _digest(selected: np.ndarray, grouping: Grouping | None) -> bytes:
    """The same for the same rows in the same groups; a mask alone is a bit a row."""
    digest = hashlib.blake2b(np.packbits(selected).tobytes(), digest_size=16)
    if grouping is not None:
        digest.update(b"groups")
        digest.update(grouping.codes.tobytes())
    return digest.digest()
