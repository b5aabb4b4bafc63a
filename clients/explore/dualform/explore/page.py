"""The page: what a person does there, and what comes of it."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from nicegui import events, ui

from dualform.client import AsyncClient, DualformError, IndexInfo, LayerInfo, NotFoundError
from dualform.explore import drawing, prediction, sections
from dualform.explore.answers import Answer, Attributed, Groups, LogitParts, Network, Query, Refused
from dualform.explore.asking import Asker, answer, class_columns, last_layer
from dualform.explore.browsing import Offered, offered
from dualform.explore.controls import Change, Controls, Event
from dualform.explore.curve import Curve, curves_of
from dualform.explore.lines import QUERY_FILE, Whole, lines_of
from dualform.explore.markup import link
from dualform.explore.network import network_of
from dualform.explore.queries import MOST_BYTES, Uploads, query_of
from dualform.explore.scene import Scene, names_for, unused
from dualform.explore.sources import Source, Sources
from dualform.explore.view import MOST_SHOWN, View, filtered, of_input, of_upload, view_of

_LOG = logging.getLogger("dualform.explore")
_SHOWN = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Opened:
    """What a view is of."""

    source: Source
    client: AsyncClient
    info: IndexInfo
    layer: LayerInfo


class Page:
    """One browser's page.

    Args:
        sources: Whom to ask.
        uploads: Those of all pages.
        names: Of output units, as `read_names` gives them; used where there are as many.
        parameters: Of the address: the view, as `View.link` gives it.
    """

    def __init__(
        self, sources: Sources, uploads: Uploads, names: Sequence[Sequence[str]], parameters: str
    ) -> None:
        self._sources, self._uploads, self._names = sources, uploads, names
        self._view, self._wrong = view_of(parse_qs(parameters, keep_blank_values=True))
        self._answer: Answer | None = None
        self._layer: LayerInfo | None = None
        self._task: asyncio.Task[None] | None = None
        self._curves: dict[tuple[str, str, int], tuple[Curve, ...]] = {}
        self._offered: tuple[Any, tuple[Offered, ...]] = (None, ())
        self._began = 0.0
        self._step = ""
        self._setting = False
        self._steps = 0
        model = uploads.model
        reads = model is not None and model.prepare is not None
        takes = "a picture, a text, a .npy or .csv file" if reads else "a .npy or .csv file"
        self._controls = Controls(self, 0 if model is None else model.count, takes)
        ui.timer(1.0, self._tick)
        self._controls.busy(False)
        self._controls.again.visible = self._controls.elsewhere.visible = False
        self._client = ui.context.client
        self._client.on_delete(self.give_up)  # nobody looks any more
        ui.timer(0.01, self._begin, once=True)

    def _begin(self) -> None:
        self._controls.ready()
        self.show(self._view, new=False)

    # What a person does.

    def followed(self, event: Event) -> None:
        """A link to a view."""
        view, self._wrong = view_of(
            parse_qs(str(event.args).removeprefix("?"), keep_blank_values=True)
        )
        self.show(view)

    def _picked(self, view: View) -> None:
        if not self._setting and view != self._view:
            self.show(view)

    def pick_index(self, event: Change) -> None:
        """Another index, from its beginning."""
        self._picked(
            self._view if event.value == self._view.index else View(index=event.value or "")
        )

    def pick_layer(self, event: Change) -> None:
        """Another layer, whose units are others."""
        if event.value != self._view.layer:
            self._picked(replace(self._view, layer=event.value or "", unit=None))

    def pick_by(self, event: Change) -> None:
        """Examples, or rows."""
        self._picked(replace(self._view, by=event.value))

    def pick_group(self, event: Change) -> None:
        """Another column of classes."""
        self._picked(replace(self._view, group=event.value or ""))

    def pick_k(self) -> None:
        """How many."""
        some = int(self._controls.k.value or 1)
        self._picked(replace(self._view, k=min(max(some, 1), MOST_SHOWN)))

    def say_step(self, event: Event) -> None:
        """The slider moves."""
        self._controls.tell_step(self._steps, int(event.args))

    def pick_step(self, event: Event) -> None:
        """The slider stands."""
        step = int(event.args)
        self._picked(replace(self._view, step=None if step >= self._steps else step))

    def pick_id(self) -> None:
        """An example, by its id."""
        text = str(self._controls.example.value or "").strip()
        if text:
            texts = self._layer is not None and self._layer.columns.get("example") == "str"
            number = text.removeprefix("-").isdecimal() and not texts
            chosen = of_upload(self._view, "")
            self.show(replace(chosen, example=int(text) if number else text))

    def pick_input(self) -> None:
        """One of the model's own inputs."""
        number = self._controls.input.value
        if number is not None:
            self.show(of_input(self._view, int(number)))

    def add_filter(self) -> None:
        """A filter."""
        text = str(self._controls.where.value or "").strip()
        if text:
            self._controls.where.value = ""
            self.show(filtered(self._view, text))

    async def uploaded(self, event: events.UploadEventArguments) -> None:
        """A file."""
        try:
            digest = self._uploads.keep(event.file.name, await event.file.read())
        except DualformError as error:
            self._fail(str(error))
            return
        finally:
            self._controls.upload.reset()
        self.show(of_upload(self._view, digest))

    def rejected(self) -> None:
        """A file that is too large."""
        self._fail(f"up to {MOST_BYTES >> 20} MiB are taken")

    def download(self) -> None:
        """The query as a file."""
        if self._answer is not None:
            sink = io.BytesIO()
            np.save(sink, self._answer.query.vector)
            ui.download.content(sink.getvalue(), QUERY_FILE)

    def give_up(self) -> None:
        """Cancel."""
        if self._task is not None:
            self._task.cancel()

    def again(self) -> None:
        """The same once more."""
        self._offered = (None, ())
        self.show(self._view, new=False)

    # What comes of it.

    def show(self, view: View, *, new: bool = True) -> None:
        """Ask for a view and show it; what was being asked is given up."""
        if self._task is not None:
            self._task.cancel()
        self._view = view
        if new:
            ui.navigate.history.push(view.link() or "?")
        self._controls.busy(True)
        self._task = asyncio.create_task(self._showing(view))

    async def _showing(self, view: View) -> None:
        me = asyncio.current_task()
        self._began = time.monotonic()
        self._controls.complain("")
        self._controls.again.visible = False
        try:
            await self._ask(view)
            self._controls.status.set_text("")
        except asyncio.CancelledError:
            if self._task is me:
                self._controls.status.set_text("Given up.")
                self._controls.again.visible = True
        except DualformError as error:
            self._fail(str(error))
        except Exception as error:
            _LOG.exception("a view could not be shown")
            self._fail(f"internal error, please report it: {type(error).__name__}: {error}")
        finally:
            if self._task is me:
                self._controls.busy(False)
                # Which view was shown or refused, of all pages, for those who wait for one.
                self._controls.state.props(f"data-shown={next(_SHOWN)}")

    async def _ask(self, view: View) -> None:
        self._tell("the indexes")
        listed = await self._sources.listed()
        opened = await self._open(view, listed)
        view = replace(view, index=opened.source.name, layer=opened.layer.name)
        self._view, self._layer = view, opened.layer
        scene = self._scene(view, opened)
        self._set_controls(opened, scene, listed)
        self._tell("examples to pick from")
        some = await self._offered_of(opened, view)
        self._controls.picker.set_content(sections.picker(some, scene))
        self._tell("the training curve")
        curves = await self._curves_of(opened)
        self._controls.curves.set_content(drawing.curves(curves, opened.info.steps, view.step))
        self._tell("the query")
        query = await query_of(
            opened.client, opened.source.index, opened.info, opened.layer, view, self._uploads
        )
        if query is None:
            self._entitle(view.index)
            self._controls.clear(sections.unasked(opened.layer))
            return
        self._entitle(f"{sections.title(query)} · {view.index}")
        await self._answered(opened, query, scene)
        if self._wrong:
            self._controls.complain("Of the link, not read: " + "; ".join(self._wrong))
            self._wrong = []

    def _entitle(self, what: str) -> None:
        """What the browser's tabs and history call it."""
        with self._client:
            ui.page_title(f"{what} · dualform explorer")

    async def _answered(self, opened: Opened, query: Query, scene: Scene) -> None:
        """The query's answers, each shown once it is there."""
        view, controls = scene.view, self._controls
        asker = Asker(
            opened.client, opened.source.index, opened.info, opened.layer, view, self._tell
        )
        found = await answer(
            asker, query, lambda early: controls.show(controls.asked, sections.asked(early, scene))
        )
        self._answer = found
        controls.show(controls.rows, sections.rows(found, scene))

        def show(network: Network | None) -> None:
            controls.show(controls.network, prediction.network(network, scene))

        network = await self._network(asker, opened, found, show)
        show(network)
        whole = self._whole(query, network)
        many = isinstance(found.groups, Groups) and found.groups.more
        lines = lines_of(opened.source, view, found.unit, found.column, whole, many=many)
        controls.show_lines(lines.python, lines.commands)

    async def _network(
        self, asker: Asker, opened: Opened, found: Answer, early: Callable[[Network], None]
    ) -> Network | None:
        model, opens, query = self._uploads.model, opened.source.opens, found.query
        if model is None or opens is None or query.inputs is None:
            return None
        if isinstance(query.inputs, Refused):
            return Network(query.inputs, query.inputs)
        return await network_of(asker, model, opens, query, found.column, early)

    def _whole(self, query: Query, network: Network | None) -> Whole | None:
        """What the whole network was asked, for the lines."""
        model = self._uploads.model
        if model is None or network is None or not isinstance(network.attributed, Attributed):
            return None
        found, classes = network.attributed, network.classes
        target = "margin" if found.margin else found.unit
        column, unit = "", found.unit
        if isinstance(classes, LogitParts):
            column, unit = classes.column, classes.unit
        return Whole(model, query.made, target, found.token, column, unit)

    async def _open(self, view: View, listed: Sequence[Source]) -> Opened:
        """The view's index and layer.

        Raises:
            DualformError: There are none such, or the index can't be asked.
        """
        names = {each.name: each.name + (" (damaged)" if each.trouble else "") for each in listed}
        if not names:
            raise NotFoundError("no index is served")
        healthy = next((each.name for each in listed if not each.trouble), listed[0].name)
        name = view.index or healthy
        self._set(self._controls.index, names, name)
        source = next((each for each in listed if each.name == name), None)
        if source is None:
            raise NotFoundError(f"no index {name!r} here; there are {', '.join(names)}")
        client = source.asked()
        info = await client.index(source.index)
        chosen = view.layer or (last_layer(info) or next(iter(info.layers.values()))).name
        if chosen not in info.layers:
            raise NotFoundError(f"{name} has no layer {chosen!r}; it has {', '.join(info.layers)}")
        return Opened(source, client, info, info.layers[chosen])

    def _scene(self, view: View, opened: Opened) -> Scene:
        last = last_layer(opened.info)
        names = () if last is None else names_for(last.d_out, self._names)
        called = "" if last is None else last.name
        return Scene(view, opened.info.version, names, called, self._uploads.model is not None)

    async def _curves_of(self, opened: Opened) -> tuple[Curve, ...]:
        key = (opened.source.name, opened.info.version, opened.layer.row_space)
        if key not in self._curves:
            self._curves[key] = await curves_of(opened.client, opened.source.index, opened.layer)
        return self._curves[key]

    async def _offered_of(self, opened: Opened, view: View) -> tuple[Offered, ...]:
        """The examples to pick from, asked for once: what was kept of them may be large."""
        layer = opened.layer
        key = (opened.source.name, opened.info.version, layer.row_space, view.after)
        if self._offered[0] != key:
            some = await offered(opened.client, opened.source.index, layer, view)
            self._offered = (key, some)
        return self._offered[1]

    def _set_controls(self, opened: Opened, scene: Scene, listed: Sequence[Source]) -> None:
        info, layer, view, controls = opened.info, opened.layer, scene.view, self._controls
        self._set(controls.layer, {name: name for name in info.layers}, view.layer)
        self._set(controls.by, controls.by.options, view.by)
        columns = class_columns(layer)
        usual = view.group if view.group in columns else (columns or [""])[0]
        self._set(controls.group, {each: each for each in columns} or {"": "no column"}, usual)
        if view.group in ("", usual):
            self._view = replace(view, group=usual if columns else "")
        self._setting = True
        controls.k.value = view.k
        controls.input.value = view.input
        self._steps = max(info.steps, 1)
        self._setting = False
        step = self._steps if view.step is None else min(view.step, self._steps)
        controls.set_steps(self._steps, step)
        controls.tell_step(self._steps, step)
        units = {scene.last: info.layers[scene.last].d_out} if scene.last else {}
        controls.facts.set_content(sections.facts(info, layer, unused(units, self._names)))
        controls.filters.set_content(_chips(view))

    def _set(self, select: ui.select, options: dict[str, str], value: str) -> None:
        self._setting = True
        select.set_options(options, value=value if value in options else None)
        self._setting = False

    def _tell(self, what: str) -> None:
        self._step = what
        self._tick()

    def _tick(self) -> None:
        if self._controls.is_busy:
            seconds = time.monotonic() - self._began
            late = f" ({seconds:.0f} s)" if seconds >= 2 else ""
            self._controls.status.set_text(f"Asking for {self._step}{late}")

    def _fail(self, why: str) -> None:
        self._controls.status.set_text("")
        self._controls.complain(why)
        self._controls.again.visible = True
        self._controls.clear()


def _chips(view: View) -> str:
    """The filters, each a link to the view without it; and that remainders do not count."""
    items = []
    for each in view.filters:
        rest = tuple(other for other in view.filters if other != each)
        without = replace(view, filters=rest)
        items.append(_chip(each, without, f"remove the filter {each}"))
    if view.residual is not None:
        most = f"remainder up to {view.residual:g}" if view.residual < 1e9 else "any remainder"
        items.append(_chip(most, replace(view, residual=None), f"the usual, not {most}"))
    return f'<ul class="filters" aria-label="filters">{"".join(items)}</ul>' if items else ""


def _chip(inner: str, without: View, said: str) -> str:
    shown = escape(inner) + ' <span aria-hidden="true">\N{MULTIPLICATION SIGN}</span>'
    return f"<li>{link(without, shown, said=said)}</li>"
