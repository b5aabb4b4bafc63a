"""The paper's figure of matches: the query's image beside the training images it attends to."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client import (
    Client,
    FailedPreconditionError,
    Filter,
    InvalidArgumentError,
    TopKResult,
)
from dualform.plot import style
from dualform.plot._parts import named, one_query

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = bytes | npt.NDArray[Any]


def matches(
    client: Client,
    queries: Mapping[str, object],
    *,
    image: Picture | None = None,
    images: Callable[[list[Any]], Sequence[Picture | None]] | None = None,
    k: int = 3,
    absolute: bool = True,
    distinct: str = "example",
    label: str | None = "label",
    where: str | Filter | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Figure:
    """The query's image, and per layer the k distinct training images with the largest weight.

    The paper's figure "Top matching training examples", with each image's weight and how many rows
    are of it: an image comes back once per epoch, and is shown once.

    Args:
        client: Any client, remote or local.
        queries: By layer, the query: float32 [d_in] or [1, d_in].
        image: The query's own: PNG bytes, or grey values [height, width] (uint8, or floats from 0
            to 1); None shows the matches alone.
        images: From a list of example ids to their images, in the same form; None takes the
            payloads kept with the recording.
        k: Images per layer.
        absolute: By |weight|, as the authors did; False: the largest signed weights.
        distinct: The metadata column with the examples' ids.
        label: A metadata column to name below each image; None for none.
        where: Which rows take part.
        index: Its name; None where one is served.
        timeout: Seconds per question.

    Returns:
        A row of images per layer, grey and without axes.

    Raises:
        InvalidArgumentError: Not one query per layer, something that is no image, or what
            `Client.top_k` refuses.
        NotFoundError: No such layer or index.
        FailedPreconditionError: An example without a payload, a payload that is no PNG, or
            matplotlib is not installed.
    """
    style.need_matplotlib()
    asked = one_query(queries)
    query_image = None if image is None else _grey(image, "image")
    answers = []
    for layer, query in asked.items():
        hits = client.top_k(
            layer,
            query,
            k=k,
            distinct=distinct,
            order="absolute" if absolute else "largest",
            where=where,
            index=index,
            timeout=timeout,
        )
        found = hits.rows[0] >= 0
        ids = [_plain(each) for each in hits[distinct][0][found]]
        if images is None:
            shown = _payloads(client, ids, index, timeout)
        else:
            given = images(ids)
            if len(given) != len(ids):
                raise InvalidArgumentError(
                    f"images gave {len(given)} for {len(ids)} examples: one each, in the ids' "
                    "order, is needed",
                    field="images",
                )
            shown = [_grey(each, f"example {i!r}") for i, each in zip(ids, given, strict=True)]
        answers.append((hits, shown))
    with style.look():
        return _draw(list(asked), answers, query_image, k, label)


def _payloads(
    client: Client, ids: list[Any], index: str | None, timeout: float | None
) -> list[npt.NDArray[np.uint8]]:
    shown = []
    advice = (
        "recorder.add_examples(ids, payloads) keeps PNG bytes while recording, and images= takes "
        "them from elsewhere"
    )
    for each, payload in zip(ids, client.examples(ids, index=index, timeout=timeout), strict=True):
        if payload is None:
            raise FailedPreconditionError(
                f"no payload of example {each!r} in the index: {advice}", reason="NO_PAYLOAD"
            )
        if isinstance(payload, str):
            raise FailedPreconditionError(
                f"the payload of example {each!r} is text, not an image: {advice}",
                reason="NO_IMAGE",
            )
        try:
            shown.append(_grey(payload, f"the payload of example {each!r}"))
        except InvalidArgumentError as error:
            raise FailedPreconditionError(f"{error}: {advice}", reason="NO_IMAGE") from None
    return shown


def _grey(picture: object, what: str) -> npt.NDArray[np.uint8]:
    """uint8 [height, width] of PNG bytes or an array."""
    if isinstance(picture, bytes):
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(picture), formats=["PNG"]) as opened:
                return np.asarray(opened.convert("L"))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
            raise InvalidArgumentError(f"{what} is no readable PNG", field="image") from None
    values = np.asarray(picture)
    if values.ndim == 2 and values.size and values.dtype == np.uint8:
        return values
    if values.ndim == 2 and values.size and values.dtype.kind == "f" and _is_unit(values):
        return np.round(values * 255).astype(np.uint8)
    raise InvalidArgumentError(
        f"{what}: {values.dtype} {list(values.shape)} is no image; PNG bytes, or [height, width] "
        "of uint8 or of floats from 0 to 1, are",
        field="image",
    )


def _is_unit(values: npt.NDArray[Any]) -> bool:
    return bool(np.all((values >= 0) & (values <= 1)))


def _draw(
    layers: Sequence[str],
    answers: Sequence[tuple[TopKResult, list[npt.NDArray[np.uint8]]]],
    query_image: npt.NDArray[np.uint8] | None,
    k: int,
    label: str | None,
) -> Figure:
    first = 0 if query_image is None else 1
    figure = style.new_figure(1.15 * (k + first) + 0.3, 1.6 * len(layers) + 0.15, images=True)
    axes = figure.subplots(len(layers), k + first, squeeze=False)
    for each in axes.flat:
        _bare(each)
    if query_image is not None:
        _show(axes[0, 0], query_image)
        axes[0, 0].set_title("query")
    for row, (layer, (hits, shown)) in enumerate(zip(layers, answers, strict=True)):
        axes[row, first].set_ylabel(f"layer {layer}")
        assert hits.counts is not None
        for place, picture in enumerate(shown):
            panel = axes[row, first + place]
            _show(panel, picture)
            lines = [f"weight {style.amount(float(hits.scores[0, place]))}"]
            if label is not None and label in hits.columns:
                lines.insert(0, f"{label} {named(_plain(hits[label][0, place]))}")
            lines.append(f"seen {hits.counts[0, place]:,} \N{MULTIPLICATION SIGN}")
            panel.set_xlabel("\n".join(lines), fontsize=style.SMALL)
    return figure


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def _show(axes: Axes, picture: npt.NDArray[np.uint8]) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
