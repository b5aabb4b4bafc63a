"""The page: controls, and what is answered. All that it shows is made by `sections`."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from nicegui import events, ui

from dualform.client import AsyncClient, DualformError, IndexInfo, LayerInfo, NotFoundError
from dualform.explore import sections
from dualform.explore.answers import Answer
from dualform.explore.asking import Asker, answer, class_columns, last_layer
from dualform.explore.browsing import offered
from dualform.explore.lines import QUERY_FILE, lines_of
from dualform.explore.markup import link
from dualform.explore.queries import MOST_BYTES, Uploads, query_of
from dualform.explore.sources import Source, Sources
from dualform.explore.view import MOST_SHOWN, View, filtered, view_of

_LOG = logging.getLogger("dualform.explore")
_CSS = Path(__file__).with_name("page.css")
# A link is followed in place; with a key held down the browser does what it always does.
_FOLLOW = """(event) => {
  const link = event.target.closest("a[data-go]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  emit(link.getAttribute("href"));
}"""
_VALUE = "(event) => emit(event.target.value)"
_NAME_UPLOAD = """document.querySelector(".q-uploader__input")
  ?.setAttribute("aria-label", "upload FILES")"""


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
        parameters: Of the address: the view, as `View.link` gives it.
    """

    def __init__(self, sources: Sources, uploads: Uploads, parameters: str) -> None:
        self._sources, self._uploads = sources, uploads
        self._takes = "a .npy or .csv file"
        if uploads.model is not None:
            self._takes = "a picture, a text, a .npy or .csv file"
        self._view, self._wrong = view_of(parse_qs(parameters, keep_blank_values=True))
        self._answer: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._step = ""
        self._setting = False
        self._steps = self._shown = 0
        self._lay_out()
        ui.context.client.on_delete(self._give_up)  # nobody looks any more
        ui.timer(0.01, self._begin, once=True)

    def _begin(self) -> None:
        ui.run_javascript(_NAME_UPLOAD.replace("FILES", self._takes))
        self.show(self._view, new=False)

    def _lay_out(self) -> None:
        ui.add_css(_CSS)
        ui.add_body_html(
            "<script>window.addEventListener('popstate', () => location.reload())</script>"
        )
        with ui.element("div").classes("explorer"):
            with ui.element("header").classes("head"):
                ui.html("<h1>dualform explorer</h1>", sanitize=False)
                self._index = self._select("index", self._pick_index)
                self._layer = self._select("layer", self._pick_layer)
                ui.element("div").classes("grow")
                self._dark = ui.dark_mode(None)
                self._copying("Copy link", "location.href")
                ui.button("Light or dark", on_click=self._turn).props("flat dense no-caps")
            with ui.element("div").classes("body"):
                with ui.element("aside").classes("side").props('aria-label="index and examples"'):
                    self._lay_out_side()
                with ui.element("main").classes("main"):
                    self._lay_out_main()

    def _lay_out_side(self) -> None:
        self._facts = ui.html("", sanitize=False)
        ui.html("<h2>Examples</h2>", sanitize=False)
        self._id = ui.input("id of a training example").props("dense outlined clearable")
        self._id.on("keydown.enter", self._pick_id)
        self._picker = self._linking("")
        ui.html("<h2>Your own query</h2>", sanitize=False)
        self._upload = (
            ui.upload(
                label=self._takes,
                auto_upload=True,
                on_upload=self._uploaded,
                max_file_size=MOST_BYTES,
                on_rejected=lambda: self._fail(f"up to {MOST_BYTES >> 20} MiB are taken"),
            )
            .props("flat bordered")
            .style("width: 100%")
        )

    def _lay_out_main(self) -> None:
        with ui.element("div").classes("controls"):
            with ui.element("div").classes("time"):
                self._when = ui.label("").classes("control-label")
                self._slider = ui.element("input").classes("slider")
                self._slider.props('type=range min=0 max=1 value=1 aria-label="training step"')
                self._slider.on("input", self._say_step, js_handler=_VALUE)
                self._slider.on("change", self._pick_step, js_handler=_VALUE)
            self._by = self._select("each", self._pick_by)
            self._by.set_options({"example": "example, rows added up", "row": "row by itself"})
            self._k = ui.number("how many", min=1, max=MOST_SHOWN, precision=0, format="%d")
            self._k.props("dense outlined").style("width: 6rem")
            self._k.on("change", self._pick_k)
            self._group = self._select("classes by", self._pick_group)
            self._where = ui.input("only rows with, such as label = 3 and step < 100")
            self._where.props("dense outlined").classes("ask")
            self._where.on("keydown.enter", self._add_filter)
            ui.button("Add filter", on_click=self._add_filter).props("outline no-caps")
            self._filters = self._linking("filters-list").style("flex-basis: 100%")
        with ui.element("div").classes("status") as self._state:
            self._spinner = ui.spinner(size="1.4em").props('aria-hidden="true"')
            self._status = ui.label("").props('role="status" aria-live="polite"')
            self._cancel = ui.button("Cancel", on_click=self._give_up).props(
                "outline dense no-caps"
            )
        self._trouble = ui.html("", sanitize=False).props('role="alert"')
        self._again = ui.button("Try again", on_click=lambda: self.show(self._view, new=False))
        self._again.props("outline no-caps")
        self._results = self._linking("results")
        with ui.element("div").classes("elsewhere") as self._elsewhere:
            ui.html("<h2>The same answer elsewhere</h2>", sanitize=False)
            ui.button(f"Download {QUERY_FILE}", on_click=self._download).props("outline no-caps")
            self._python = self._code("Python")
            self._commands = self._code("Commands")
        self._timer = ui.timer(1.0, self._tick)
        self._busy(False)
        self._again.visible = self._elsewhere.visible = False

    def _code(self, name: str) -> Any:
        with ui.element("div").classes("code"):
            shown = ui.html("", sanitize=False)
            self._copying(
                f"Copy {name}", "event.target.closest('.code').querySelector('code').innerText"
            )
        return shown

    def _copying(self, label: str, what: str) -> None:
        """A button that copies; browsers allow it in the click itself alone."""
        made = ui.button(label).props("flat dense no-caps")
        script = f"async (event) => {{ await navigator.clipboard.writeText({what}); emit() }}"
        made.on("click", lambda: ui.notify("Copied."), js_handler=script)

    def _select(self, label: str, picked: Any) -> Any:
        made = ui.select([], label=label, on_change=picked)
        return made.props("dense outlined options-dense").classes("pick")

    def _linking(self, classes: str) -> Any:
        """HTML whose links to views are followed in place."""
        return (
            ui.html("", sanitize=False)
            .classes(classes)
            .on("click", self._followed, js_handler=_FOLLOW)
        )

    # What a person does.

    def _followed(self, event: events.GenericEventArguments) -> None:
        view, wrong = view_of(parse_qs(str(event.args).removeprefix("?"), keep_blank_values=True))
        self._wrong = wrong
        self.show(view)

    def _picked(self, view: View) -> None:
        if not self._setting and view != self._view:
            self.show(view)

    def _pick_index(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._picked(
            self._view if event.value == self._view.index else View(index=event.value or "")
        )

    def _pick_layer(self, event: events.ValueChangeEventArguments[Any]) -> None:
        if event.value != self._view.layer:
            self._picked(replace(self._view, layer=event.value or "", unit=None))

    def _pick_by(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._picked(replace(self._view, by=event.value))

    def _pick_group(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._picked(replace(self._view, group=event.value or ""))

    def _pick_k(self) -> None:
        self._picked(replace(self._view, k=min(max(int(self._k.value or 1), 1), MOST_SHOWN)))

    def _pick_step(self, event: events.GenericEventArguments) -> None:
        step = int(event.args)
        self._picked(replace(self._view, step=None if step >= self._steps else step))

    def _pick_id(self) -> None:
        text = str(self._id.value or "").strip()
        if text:
            example = int(text) if text.removeprefix("-").isdecimal() else text
            self.show(
                replace(self._view, example=example, seen=None, place=None, upload="", unit=None)
            )

    def _add_filter(self) -> None:
        text = str(self._where.value or "").strip()
        if text:
            self._where.value = ""
            self.show(filtered(self._view, text))

    async def _uploaded(self, event: events.UploadEventArguments) -> None:
        try:
            digest = self._uploads.keep(event.file.name, await event.file.read())
        except DualformError as error:
            self._fail(str(error))
            return
        finally:
            self._upload.reset()
        view = replace(self._view, upload=digest, number=None, example=None, seen=None, place=None)
        self.show(replace(view, unit=None))

    def _turn(self) -> None:
        self._dark.value = not self._dark.value

    def _download(self) -> None:
        if self._answer is not None:
            sink = io.BytesIO()
            np.save(sink, self._answer.query.vector)
            ui.download.content(sink.getvalue(), QUERY_FILE)

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # What comes of it.

    def show(self, view: View, *, new: bool = True) -> None:
        """Ask for a view and show it; what was being asked is given up."""
        if self._task is not None:
            self._task.cancel()
        self._view = view
        if new:
            ui.navigate.history.push(view.link() or "?")
        self._busy(True)
        self._task = asyncio.create_task(self._showing(view))

    async def _showing(self, view: View) -> None:
        me = asyncio.current_task()
        self._began = time.monotonic()
        self._trouble.set_content("")
        self._again.visible = False
        try:
            await self._ask(view)
            self._status.set_text("")
        except asyncio.CancelledError:
            if self._task is me:
                self._status.set_text("Given up.")
                self._again.visible = True
        except DualformError as error:
            self._fail(str(error))
        except Exception as error:
            _LOG.exception("a view could not be shown")
            self._fail(f"internal error, please report it: {type(error).__name__}: {error}")
        finally:
            if self._task is me:
                self._busy(False)
                # How many views were shown or refused, for those who wait for one.
                self._shown += 1
                self._state.props(f"data-shown={self._shown}")

    async def _ask(self, view: View) -> None:
        self._tell("the indexes")
        listed = await self._sources.listed()
        opened = await self._open(view, listed)
        view = replace(view, index=opened.source.name, layer=opened.layer.name)
        self._view = view
        self._set_controls(view, opened, listed)
        self._tell("examples to pick from")
        some = await offered(opened.client, opened.source.index, opened.layer, view)
        self._picker.set_content(sections.picker(some, view, opened.info.version))
        self._tell("the query")
        query = await query_of(
            opened.client, opened.source.index, opened.info, opened.layer, view, self._uploads
        )
        if query is None:
            self._results.set_content("<p>Pick an example on the left, or upload a query.</p>")
            self._elsewhere.visible = False
            return
        asker = Asker(
            opened.client, opened.source.index, opened.info, opened.layer, view, self._tell
        )
        found = await answer(asker, query)
        self._answer = found
        self._results.set_content(sections.whole(found, view, opened.info.version))
        lines = lines_of(opened.source, view, found.unit, found.column)
        self._python.set_content(_pre(lines.python))
        self._commands.set_content(_pre(lines.commands))
        self._elsewhere.visible = True
        if self._wrong:
            self._trouble.set_content(_alert("Of the link, not read: " + "; ".join(self._wrong)))
            self._wrong = []

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
        self._set(self._index, names, name)
        source = next((each for each in listed if each.name == name), None)
        if source is None:
            raise NotFoundError(f"no index {name!r} here; there are {', '.join(names)}")
        client = source.asked()
        info = await client.index(source.index)
        chosen = view.layer or (last_layer(info) or next(iter(info.layers.values()))).name
        if chosen not in info.layers:
            raise NotFoundError(f"{name} has no layer {chosen!r}; it has {', '.join(info.layers)}")
        return Opened(source, client, info, info.layers[chosen])

    def _set_controls(self, view: View, opened: Opened, listed: Sequence[Source]) -> None:
        info, layer = opened.info, opened.layer
        self._set(self._layer, {name: name for name in info.layers}, view.layer)
        self._set(self._by, self._by.options, view.by)
        columns = class_columns(layer)
        usual = view.group if view.group in columns else (columns or [""])[0]
        self._set(self._group, {each: each for each in columns} or {"": "no column"}, usual)
        if view.group in ("", usual):
            self._view = replace(view, group=usual if columns else "")
        self._setting = True
        self._k.value = view.k
        self._steps = max(info.steps, 1)
        self._setting = False
        step = self._steps if view.step is None else min(view.step, self._steps)
        self._slider.props(f"max={self._steps} value={step}")
        self._tell_step(step)
        self._facts.set_content(sections.facts(info, layer))
        self._filters.set_content(_chips(view))

    def _set(self, select: Any, options: Any, value: str) -> None:
        self._setting = True
        select.set_options(options, value=value if value in options else None)
        self._setting = False

    def _say_step(self, event: events.GenericEventArguments) -> None:
        self._tell_step(int(event.args))

    def _tell_step(self, step: int) -> None:
        trained = step >= self._steps
        self._when.set_text(
            f"the trained network ({self._steps:,} steps)" if trained else f"after {step:,} steps"
        )

    def _busy(self, busy: bool) -> None:
        self._spinner.visible = self._cancel.visible = busy
        self._results.classes(**{"add" if busy else "remove": "asking"})

    def _tell(self, what: str) -> None:
        self._step = what
        self._tick()

    def _tick(self) -> None:
        if self._cancel.visible:
            seconds = time.monotonic() - self._began
            late = f" ({seconds:.0f} s)" if seconds >= 2 else ""
            self._status.set_text(f"Asking for {self._step}{late}")

    def _fail(self, why: str) -> None:
        self._status.set_text("")
        self._trouble.set_content(_alert(why))
        self._again.visible = True
        self._results.set_content("")
        self._elsewhere.visible = False


def _chips(view: View) -> str:
    """The filters, each a link to the view without it."""
    if not view.filters:
        return ""
    items = []
    for each in view.filters:
        rest = tuple(other for other in view.filters if other != each)
        inner = f"{escape(each)} \N{MULTIPLICATION SIGN}"
        without = replace(view, filters=rest)
        items.append(f"<li>{link(without, inner, said=f'remove the filter {each}')}</li>")
    return f'<ul class="filters" aria-label="filters">{"".join(items)}</ul>'


def _alert(why: str) -> str:
    return f'<div class="trouble">{escape(why)}</div>'


def _pre(code: str) -> str:
    return f'<pre tabindex="0"><code>{escape(code)}</code></pre>'
