"""What is asked about: a training example's key, or what was uploaded."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualform.client import (
    AsyncClient,
    DualformError,
    IndexInfo,
    InvalidArgumentError,
    LayerInfo,
    NotFoundError,
    UnavailableError,
)
from dualform.explore.answers import Query
from dualform.explore.asking import last_layer
from dualform.explore.behind import payloads_of
from dualform.explore.keys import Key, key_of
from dualform.explore.payloads import Text
from dualform.explore.tokens import marked
from dualform.explore.view import View

MOST_BYTES = 64 << 20
"""Of one upload, and of all that are kept together."""


@dataclass(frozen=True, eq=False)
class Upload:
    """Queries that somebody uploaded.

    Attributes:
        name: Of the file.
        queries: float32 [n, d].
    """

    name: str
    queries: npt.NDArray[np.float32]


class Uploads:
    """What was uploaded, by its digest, the latest 64 MiB; links name it while the page runs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Upload] = OrderedDict()

    def keep(self, name: str, data: bytes) -> str:
        """Keeps a .npy or .csv file of numbers.

        Args:
            name: Of the file; how it ends says what it is.
            data: What it holds: one query [d], or several [n, d].

        Returns:
            Its digest, for the view.

        Raises:
            InvalidArgumentError: Too large, or not such numbers.
        """
        if len(data) > MOST_BYTES:
            raise InvalidArgumentError(
                f"{name} has {len(data):,} bytes; up to {MOST_BYTES >> 20} MiB are taken"
            )
        digest = hashlib.sha256(data).hexdigest()[:16]
        self._kept[digest] = Upload(name, _numbers(name, data))
        self._kept.move_to_end(digest)
        while sum(each.queries.nbytes for each in self._kept.values()) > MOST_BYTES:
            if len(self._kept) == 1:
                break
            self._kept.popitem(last=False)
        return digest

    def kept(self, digest: str) -> Upload:
        """What has this digest.

        Raises:
            NotFoundError: It is not here any more, or never was.
        """
        if digest not in self._kept:
            raise NotFoundError(
                "the file that this link is about was uploaded to another run of the page, or long "
                "ago: upload it again"
            )
        return self._kept[digest]


async def query_of(
    client: AsyncClient,
    index: str | None,
    info: IndexInfo,
    layer: LayerInfo,
    view: View,
    uploads: Uploads,
) -> Query | None:
    """What a view asks about; None where nothing is chosen.

    Raises:
        DualformError: There is no such example, place or upload, or it does not fit the layer.
    """
    if view.upload:
        return _uploaded(view, layer, info, uploads.kept(view.upload))
    if view.example is None:
        return None
    key = await key_of(client, layer, view.example, seen=view.seen, place=view.place, index=index)
    payload = (await payloads_of(client, [view.example], index))[0]
    text = None
    if isinstance(payload, Text):
        text = marked(payload.text, {}, max(key.places, default=-1) + 1)
    return Query(
        key.query,
        await _last(client, index, info, layer, view, key),
        _said(layer, key),
        view.example,
        key.columns,
        key.steps,
        key.places,
        payload,
        text,
    )


async def _last(
    client: AsyncClient,
    index: str | None,
    info: IndexInfo,
    layer: LayerInfo,
    view: View,
    key: Key,
) -> npt.NDArray[np.float32] | None:
    """What the last layer saw of the same row; None where that is not known."""
    last = last_layer(info)
    if last is None or last.name == layer.name or view.example is None:
        return None
    same = last.row_space == layer.row_space
    place = key.columns.get("position") if same else None
    try:
        found = await key_of(
            client, last, view.example, seen=key.columns["step"], place=place, index=index
        )
    except UnavailableError:
        raise
    except DualformError:
        return None
    return found.query


def _said(layer: LayerInfo, key: Key) -> str:
    place = key.columns.get("position")
    at = "" if place is None else f", position {place}"
    return f"as layer {layer.name} saw it in training step {key.columns['step']}{at}"


def _uploaded(view: View, layer: LayerInfo, info: IndexInfo, upload: Upload) -> Query:
    queries = upload.queries
    if queries.shape[1] != layer.d_in:
        fits = [each.name for each in info.layers.values() if each.d_in == queries.shape[1]]
        raise InvalidArgumentError(
            f"queries in {upload.name} have {queries.shape[1]:,} numbers; layer {layer.name} "
            f"takes {layer.d_in:,}"
            + (f"; it fits layer {', '.join(fits)}" if fits else ", and no layer that many")
        )
    if view.number >= len(queries):
        raise InvalidArgumentError(
            f"{upload.name} holds queries 0 to {len(queries) - 1}; {view.number} is none of them"
        )
    vector = queries[view.number : view.number + 1]
    return Query(vector, None, f"query {view.number} of {len(queries):,} in {upload.name}")


def _numbers(name: str, data: bytes) -> npt.NDArray[np.float32]:
    """float32 [n, d] of a file.

    Raises:
        InvalidArgumentError: It is none, or holds what is not finite.
    """
    try:
        if name.lower().endswith(".csv"):
            text = data.decode("utf-8-sig")
            values = np.loadtxt(io.StringIO(text), delimiter=",", ndmin=2, dtype=np.float64)
        else:
            values = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"{name} can't be read ({error}): a .npy file of float32 [n, d_in], as numpy.save "
            "writes it, or a .csv file of such numbers without a head is needed"
        ) from None
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiu" or not values.size:
        raise InvalidArgumentError(
            f"{name} holds {values.dtype} {list(values.shape)}; numbers [d_in] or [n, d_in] are "
            "needed"
        )
    with np.errstate(over="ignore"):
        queries = np.atleast_2d(values).astype(np.float32)
    if not bool(np.isfinite(queries).all()):
        raise InvalidArgumentError(f"{name} holds NaN or Inf; queries must be finite")
    return queries
