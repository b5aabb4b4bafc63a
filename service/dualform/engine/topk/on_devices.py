"""Top-k by weight where keys lie on devices: FAISS proposes there, the CPU decides as everywhere.

A device finds the k + slack rows with the largest float32 weights. Each is within `error_bound` of
the exact one, as products added up in float32 in any order are, and whatever was not found is no
larger, as float32 goes, than the least that was. So where the k-th best proven score is above that
least one by more than the bound, nothing is missing; where it is not, more rows are asked for, and
in the end the CPU looks at all of them.
"""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.devices.answers import DeviceAnswers
from dualform.engine.devices.device import MAX_K
from dualform.engine.devices.devices import Devices
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.offer import Offer
from dualform.engine.topk.ranking import Ranking
from dualform.engine.topk.scan import Scan, block_queries
from dualform.engine.topk.top_k import Hits, TopK

_SLACK = 32
_WIDER = 4
_SIGNS = {"largest": (1,), "smallest": (-1,), "absolute": (1, -1)}
"""The queries whose largest weights are asked for."""


def devices_apply(devices: Devices, ranking: Ranking) -> str | None:
    """Why devices can't answer this question; None where they can."""
    for given, what in (
        (ranking.grouping, "group_by"),
        (ranking.contribution, "contributions"),
        (ranking.cosine or None, "cosines"),
        (ranking.distinct, "distinct"),
    ):
        if given is not None:
            return f"devices propose rows by weight, without {what}"
    most = MAX_K - _SLACK
    if ranking.k > most:
        return f"k is {ranking.k:,}; a device is asked for at most {most:,}"
    return devices.why_not()


def offer(
    devices: Devices, layer: Layer, queries: torch.Tensor, ranking: Ranking, selected: np.ndarray
) -> Offer | None:
    """What devices would do of a top-k; None where none holds, or can be brought, any row."""
    n = queries if ranking.order != "absolute" else torch.cat([queries, queries])
    answers = DeviceAnswers(devices, layer, n, selected, values=False, stop=None)
    return answers.offer(lambda paces: paces.finding(ranking.k))


class DeviceScan:
    """One top-k question to one layer, by devices; the CPU takes what lies on none.

    Args:
        devices: Which.
        layer: Whose memory.
        queries: float32 [n, d_in], finite.
        ranking: What is ranked: weights, alone.
        rest: The strategy by which the CPU looks at the rest: "certified", "flat" or "scan".
        faiss: As for `Scan`.
        stream: Bring the rest to the devices instead.
        stop: Asked between tiles.
    """

    def __init__(
        self,
        devices: Devices,
        layer: Layer,
        queries: torch.Tensor,
        ranking: Ranking,
        rest: str,
        faiss: bool,
        stream: bool,
        stop: Stop | None,
    ) -> None:
        self._devices, self._layer, self._queries = devices, layer, queries
        self._ranking, self._stream, self._stop = ranking, stream, stop
        self._rest = Scan(layer, queries, ranking, rest, faiss, stop)

    @property
    def kept_share(self) -> float | None:
        """As `Scan` has it, of the rest."""
        return self._rest.kept_share

    def run(self, selected: np.ndarray) -> Hits:
        """Answer over the selected rows, bool [total]: those whose keys are finite.

        Raises:
            OnDeviceError: A device is out of memory, or has failed.
        """
        size = block_queries(self._layer.rows, 1, self._ranking.k)
        return Hits.join(
            [
                self._run_block(self._queries[first : first + size], selected)
                for first in range(0, len(self._queries), size)
            ]
        )

    def _run_block(self, queries: torch.Tensor, selected: np.ndarray) -> Hits:
        best = TopK(queries, self._ranking, self._layer, self._stop)
        k = min(MAX_K, self._ranking.k + max(_SLACK, self._ranking.k // 8))
        which = np.arange(len(queries))
        last, searched = self._propose(queries, k, selected, best, which)
        here = np.zeros(len(selected), bool)
        for shard in self._shards(searched):
            here[shard] = selected[shard]
        left = selected & ~here
        if left.any():
            self._rest.propose(queries, self._ranking, left, best)
        while True:
            # What was not found is no better than the last that was.
            unsure = last + best.error[which] >= best.limits()[which, 0]
            which = which[unsure]
            if not which.size:
                return best.result()
            for shard in self._shards(searched):
                best.forget(which, shard.start, shard.stop)
            if k < MAX_K:
                k = min(MAX_K, _WIDER * k)
                last, again = self._propose(queries, k, here, best, which)
                if not (searched & ~again).any():
                    continue
                for shard in self._shards(again):
                    best.forget(which, shard.start, shard.stop)
            self._rest.look_at_all(queries, here, best, which)
            return best.result()

    def _propose(
        self,
        queries: torch.Tensor,
        k: int,
        selected: np.ndarray,
        best: TopK,
        which: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take what devices find for these queries, int64 [n].

        Returns:
            What the merits of rows that were not found are at most, but for rounding, float64 [n];
            and which shards were searched, bool [shards].
        """
        asked = queries[torch.from_numpy(which)]
        signs = _SIGNS[self._ranking.order]
        signed = torch.cat([sign * asked for sign in signs])
        answers = DeviceAnswers(
            self._devices, self._layer, signed, selected, values=False, stop=self._stop
        )
        found = answers.nearest(k, self._stream)
        of_query = np.tile(which, len(signs)).repeat(found.merits.shape[1])
        merits, positions = found.merits.reshape(-1), found.positions.reshape(-1)
        if len(signs) > 1:  # of a row that both found, one of the two
            merits = np.abs(merits)
            once = np.unique(of_query * self._layer.rows + positions, return_index=True)[1]
            of_query, merits, positions = of_query[once], merits[once], positions[once]
        best.add_weights(of_query, merits, positions)
        return found.last.reshape(len(signs), -1).max(axis=0), found.searched

    def _shards(self, which: np.ndarray) -> list[slice]:
        """Where some shards, bool [all], are."""
        shards = (self._layer.shards[number] for number in np.flatnonzero(which))
        return [slice(shard.start, shard.start + shard.rows) for shard in shards]
