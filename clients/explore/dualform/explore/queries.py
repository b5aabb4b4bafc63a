"""What is asked about: a training example's key, or what was uploaded."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

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
from dualform.explore.answers import Query, Refused
from dualform.explore.asking import last_layer
from dualform.explore.behind import payloads_of
from dualform.explore.keys import Key, key_of
from dualform.explore.model import Model
from dualform.explore.payloads import (
    Nothing,
    Payload,
    Picture,
    Text,
    media_of,
    payload_of,
    shortened,
)
from dualform.explore.tokens import marked
from dualform.explore.view import ExampleId, View

MOST_BYTES = 64 << 20
"""Of one upload, and of all that are kept together."""


@dataclass(frozen=True, eq=False)
class Upload:
    """What somebody uploaded.

    Attributes:
        name: Of the file.
        digest: Of what it holds.
        size: Its bytes.
        queries: float32 [n, d], of a file of numbers.
        payload: Of another: a picture's bytes, or a text.
    """

    name: str
    digest: str
    size: int
    queries: npt.NDArray[np.float32] | None = None
    payload: bytes | str | None = None


class Uploads:
    """What was uploaded, by its digest, the latest 64 MiB; links name it while the page runs.

    Args:
        model: What pictures and texts are for; None takes numbers alone.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.model = model
        self._kept: OrderedDict[str, Upload] = OrderedDict()

    def keep(self, name: str, data: bytes) -> str:
        """Keeps a .npy or .csv file of numbers; with a model, a picture or a text too.

        Args:
            name: Of the file; how it ends says whether it is numbers.
            data: What it holds: one query [d] or several [n, d]; a picture, or UTF-8.

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
        upload = Upload(name, digest, len(data))
        if name.lower().endswith((".npy", ".csv")):
            upload = replace(upload, queries=_numbers(name, data))
        elif self.model is None or self.model.prepare is None:
            raise InvalidArgumentError(
                f"{name} is no .npy or .csv file; pictures and texts are a model's: "
                "dualform explore INDEX --model FILE.py:FUNCTION, which returns (model, prepare)"
            )
        else:
            upload = replace(upload, payload=_payload(name, data))
        self._kept[digest] = upload
        self._kept.move_to_end(digest)
        while sum(each.size for each in self._kept.values()) > MOST_BYTES:
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
        return await _of_upload(view, layer, info, uploads)
    if view.input is not None:
        return await _of_input(view, layer, info, uploads.model, view.input)
    if view.example is None:
        return None
    key = await key_of(client, layer, view.example, seen=view.seen, place=view.place, index=index)
    payload = (await payloads_of(client, [view.example], index))[0]
    named = "" if index is None else f", index={index!r}"
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
        shortened(payload),
        text,
        await _inputs(client, index, view.example, payload, uploads.model),
        f"prepare(client.examples([{view.example!r}]{named})[0])",
        key.columns.get("position"),
    )


async def _of_upload(view: View, layer: LayerInfo, info: IndexInfo, uploads: Uploads) -> Query:
    upload, model = uploads.kept(view.upload), uploads.model
    if upload.queries is not None:
        return _uploaded(view, layer, info, upload, upload.queries)
    assert model is not None
    assert upload.payload is not None
    shown = payload_of(upload.payload)
    if isinstance(shown, Picture):
        shown = replace(shown, address=f"upload?digest={upload.digest}")
    inputs = await asyncio.to_thread(model.prepared, upload.payload)
    how = "'rb'" if isinstance(upload.payload, bytes) else "encoding='utf-8'"
    made = f"prepare(open({upload.name!r}, {how}).read())"
    return await _modelled(view, layer, info, model, inputs, upload.name, made, shown)


async def _of_input(
    view: View, layer: LayerInfo, info: IndexInfo, model: Model | None, number: int
) -> Query:
    if model is None:
        raise NotFoundError(
            "the link is about an input of a model: dualform explore … --model FILE.py:FUNCTION"
        )
    inputs, made = model.numbered(number), model.slicing(number)
    said = f"input {number} of {model.spec}{model.labelled(number)}"
    return await _modelled(view, layer, info, model, inputs, said, made, None)


async def _inputs(
    client: AsyncClient,
    index: str | None,
    example: ExampleId,
    payload: Payload,
    model: Model | None,
) -> Any:
    """A training example as the model takes it, of what was kept of it; None where that is not
    known, Refused where it can't be made."""
    if model is None or model.prepare is None:
        return None
    if isinstance(payload, Nothing):
        return Refused(payload.trouble) if payload.trouble else None
    (kept,) = await client.examples([example], index=index)
    assert kept is not None
    try:
        return await asyncio.to_thread(model.prepared, kept)
    except DualformError as error:
        return Refused(str(error))


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


def _uploaded(
    view: View,
    layer: LayerInfo,
    info: IndexInfo,
    upload: Upload,
    queries: npt.NDArray[np.float32],
) -> Query:
    if queries.shape[1] != layer.d_in:
        fits = [each.name for each in info.layers.values() if each.d_in == queries.shape[1]]
        raise InvalidArgumentError(
            f"queries in {upload.name} have {queries.shape[1]:,} numbers; layer {layer.name} "
            f"takes {layer.d_in:,}"
            + (f"; it fits layer {', '.join(fits)}" if fits else ", and no layer that many")
        )
    number = _place(view, upload.name, len(queries), 0)
    said = f"query {number} of {len(queries):,} in {upload.name}"
    return Query(queries[number : number + 1], None, said)


async def _modelled(
    view: View,
    layer: LayerInfo,
    info: IndexInfo,
    model: Model,
    inputs: Any,
    name: str,
    made: str,
    shown: Payload | None,
) -> Query:
    """One input of the model's, as its layers see it."""
    last = last_layer(info)
    names = [layer.name] if last is None else list(dict.fromkeys([layer.name, last.name]))
    seen = await model.queries(inputs, names)
    here = seen[layer.name]
    number = _place(view, name, len(here), len(here) - 1)
    other = None
    if last is not None and last.name != layer.name and len(seen[last.name]) == len(here):
        other = seen[last.name][number : number + 1]
    text = marked(shown.text, {}, len(here)) if isinstance(shown, Text) else None
    at = f", place {number} of {len(here)}" if len(here) > 1 else ""
    said = f"{name}, as layer {layer.name} of the model sees it{at}"
    shown = None if shown is None else shortened(shown)
    query = here[number : number + 1]
    token = number if len(here) > 1 else None
    return Query(
        query, other, said, payload=shown, text=text, inputs=inputs, made=made, token=token
    )


def _place(view: View, name: str, count: int, usual: int) -> int:
    number = usual if view.number is None else view.number
    if number >= count:
        raise InvalidArgumentError(
            f"{name} holds queries 0 to {count - 1}; {number} is none of them"
        )
    return number


def _payload(name: str, data: bytes) -> bytes | str:
    if media_of(data) is not None:
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"{name} is no picture that browsers show (PNG, JPEG, GIF, WebP), and no UTF-8 text"
        ) from None


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
