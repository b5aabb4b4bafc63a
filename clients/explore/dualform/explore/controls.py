"""The page's controls: what stands where, and whom a click tells."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Protocol

from nicegui import events, ui

from dualform.explore.lines import QUERY_FILE
from dualform.explore.queries import MOST_BYTES
from dualform.explore.view import MOST_SHOWN, View

_CSS = Path(__file__).with_name("page.css")
# A link is followed in place; with a key held down the browser does what it always does.
_FOLLOW = """(event) => {
  const link = event.target.closest("a[data-go]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  emit(link.getAttribute("href"));
}"""
_VALUE = "(event) => emit(event.target.value)"
# The library has a control within a control: one of them is to be known, with a name. It makes them
# anew after each file; who stood there stays there.
_NAME = """const uploader = document.querySelector(".q-uploader");
let within = false;
const name = () => {
  const input = uploader.querySelector(".q-uploader__input"), button = input?.closest(".q-btn");
  if (!button || input.ariaLabel) return;
  button.setAttribute("role", "none");
  button.tabIndex = -1;
  input.tabIndex = 0;
  input.ariaLabel = "upload FILES";
  for (const key of ["keydown", "keyup"])
    input.addEventListener(key, event => event.stopPropagation());
  if (within && document.activeElement === document.body) input.focus();
};
name();
document.addEventListener("focusin", event => { within = uploader.contains(event.target); });
new MutationObserver(name).observe(uploader, {childList: true, subtree: true});"""
_EACH = {"example": "example, rows added up", "row": "row by itself"}

Event = events.GenericEventArguments
Change = events.ValueChangeEventArguments[Any]


class Told(Protocol):
    """Who is told what a person does."""

    def followed(self, event: Event) -> None:
        """A link to a view."""

    def pick_index(self, event: Change) -> None:
        """Another index."""

    def pick_layer(self, event: Change) -> None:
        """Another layer."""

    def pick_by(self, event: Change) -> None:
        """Examples, or rows."""

    def pick_group(self, event: Change) -> None:
        """Another column of classes."""

    def pick_k(self) -> None:
        """How many."""

    def pick_id(self) -> None:
        """An example, by its id."""

    def pick_input(self) -> None:
        """One of the model's own inputs."""

    def say_step(self, event: Event) -> None:
        """The slider moves."""

    def pick_step(self, event: Event) -> None:
        """The slider stands."""

    def add_filter(self) -> None:
        """A filter."""

    async def uploaded(self, event: events.UploadEventArguments) -> None:
        """A file."""

    def rejected(self) -> None:
        """A file that is too large."""

    def download(self) -> None:
        """The query as a file."""

    def give_up(self) -> None:
        """Cancel."""

    def again(self) -> None:
        """The same once more."""


class Controls:
    """All that is on the page, laid out; what is answered goes into the HTML elements.

    Args:
        told: Who is told.
        inputs: How many inputs the user's model brings.
        takes: What may be uploaded, in words.
    """

    def __init__(self, told: Told, inputs: int, takes: str) -> None:
        self._told, self._takes = told, takes
        ui.add_css(_CSS)
        ui.add_body_html(
            "<script>window.addEventListener('popstate', () => location.reload())</script>"
        )
        ui.html('<a class="skip" href="#answer">to the answer</a>', sanitize=False)
        with ui.element("div").classes("explorer"):
            with ui.element("header").classes("head"):
                self._lay_out_head()
            with ui.element("div").classes("body"):
                # The library has a main around all of this.
                with ui.element("section").classes("side").props('aria-label="examples"'):
                    self._lay_out_side(inputs)
                with ui.element("section").classes("main") as answer:
                    answer.props('id="answer" tabindex="-1" aria-label="answer"')
                    self._lay_out_controls()
                    self._lay_out_state()
                    self._lay_out_answer()

    def ready(self) -> None:
        """Once the browser has it: names what the library leaves without one."""
        ui.run_javascript(_NAME.replace("FILES", self._takes))

    def _lay_out_head(self) -> None:
        ui.html("<h1>dualform explorer</h1>", sanitize=False)
        self.index = self._select("index", self._told.pick_index)
        self.layer = self._select("layer", self._told.pick_layer)
        ui.element("div").classes("grow")
        self._dark = ui.dark_mode(None)
        self._copying("Copy link", "location.href")
        ui.button("Light or dark", on_click=self._turn).props("flat dense no-caps")

    def _lay_out_side(self, inputs: int) -> None:
        self.facts = ui.html("", sanitize=False)
        with ui.element("div").classes("group"):
            ui.html("<h2>Examples</h2>", sanitize=False)
            self.example = ui.input("id of a training example").props("dense outlined clearable")
            self.example.on("keydown.enter", self._told.pick_id)
            self.picker = self._linking("")
        with ui.element("div").classes("group"):
            ui.html("<h2>Your own query</h2>", sanitize=False)
            self.input = ui.number(
                f"input of your model, 0 to {inputs - 1}", min=0, max=inputs - 1, format="%d"
            )
            self.input.props("dense outlined").on("keydown.enter", self._told.pick_input)
            self.input.visible = inputs > 0
            self.upload = (
                ui.upload(
                    label=self._takes,
                    auto_upload=True,
                    on_upload=self._told.uploaded,
                    max_file_size=MOST_BYTES,
                    on_rejected=self._told.rejected,
                )
                .props("flat bordered")
                .style("width: 100%")
            )

    def _lay_out_controls(self) -> None:
        with ui.element("div").classes("controls"):
            with ui.element("div").classes("time"):
                self.curves = ui.html("", sanitize=False)
                self._when = ui.label("").classes("control-label")
                self._slider = ui.element("input").classes("slider")
                self._slider.props('type=range min=0 max=1 value=1 aria-label="training step"')
                self._slider.on("input", self._told.say_step, js_handler=_VALUE)
                self._slider.on("change", self._told.pick_step, js_handler=_VALUE)
            self.by = self._select("each", self._told.pick_by, _EACH, View.by)
            self.k = ui.number(
                "how many", value=View.k, min=1, max=MOST_SHOWN, precision=0, format="%d"
            )
            self.k.props("dense outlined").style("width: 7rem")
            self.k.on("change", self._told.pick_k)
            self.group = self._select("classes by", self._told.pick_group)
            self.where = ui.input("only rows with, such as label = 3 and step < 100")
            self.where.props("dense outlined").classes("ask")
            self.where.on("keydown.enter", self._told.add_filter)
            ui.button("Add filter", on_click=self._told.add_filter).props("outline no-caps")
            self.filters = self._linking("filters-list").style("flex-basis: 100%")

    def _lay_out_state(self) -> None:
        with ui.element("div").classes("status") as self.state:
            self._spinner = ui.spinner(size="1.4em").props('aria-hidden="true"')
            self.status = ui.label("").props('role="status" aria-live="polite"')
            self._cancel = ui.button("Cancel", on_click=self._told.give_up)
            self._cancel.props("outline dense no-caps")
        self.trouble = ui.html("", sanitize=False).props('role="alert"')
        self.again = ui.button("Try again", on_click=self._told.again)
        self.again.props("outline no-caps")

    def _lay_out_answer(self) -> None:
        self.asked = self._linking("results")
        self.network = self._linking("results")
        self.rows = self._linking("results")
        with ui.element("div").classes("elsewhere") as self.elsewhere:
            ui.html("<h2>The same answer elsewhere</h2>", sanitize=False)
            ui.button(f"Download {QUERY_FILE}", on_click=self._told.download).props(
                "outline no-caps"
            )
            self.python = self._code("Python")
            self.commands = self._code("Commands")

    def set_steps(self, steps: int, step: int) -> None:
        """The slider's range and place."""
        self._slider.props(f"max={steps} value={step}")

    def tell_step(self, steps: int, step: int) -> None:
        """What the slider stands at."""
        trained = step >= steps
        self._when.set_text(
            f"the trained network ({steps:,} steps)" if trained else f"after {step:,} steps"
        )

    @property
    def is_busy(self) -> bool:
        """Something is being asked."""
        return bool(self._cancel.visible)

    def busy(self, busy: bool) -> None:
        """What stands there is of another view; or it is not any more."""
        self._spinner.visible = self._cancel.visible = busy
        for part in (self.asked, self.network, self.rows):
            self.old(part, busy)

    def old(self, part: Any, old: bool) -> None:
        """A part is still of another view, or not."""
        part.classes(**{"add" if old else "remove": "asking"})

    def show(self, part: Any, html: str) -> None:
        """A part is there."""
        part.set_content(html)
        self.old(part, False)

    def clear(self, instead: str = "") -> None:
        """No answer; something else in its place."""
        self.show(self.asked, instead)
        self.show(self.network, "")
        self.show(self.rows, "")
        self.elsewhere.visible = False

    def show_lines(self, python: str, commands: str) -> None:
        """The lines to copy."""
        self.python.set_content(_pre(python))
        self.commands.set_content(_pre(commands))
        self.elsewhere.visible = True

    def complain(self, why: str) -> None:
        """Trouble, or "" for none any more."""
        self.trouble.set_content(f'<div class="trouble">{escape(why)}</div>' if why else "")

    async def _turn(self) -> None:
        """Until it is turned it is as the system has it, which the browser knows."""
        self._dark.value = not await ui.run_javascript(
            "document.body.classList.contains('body--dark')"
        )

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

    def _select(
        self, label: str, picked: Any, options: dict[str, str] | None = None, value: Any = None
    ) -> Any:
        made = ui.select(options or {}, label=label, value=value, on_change=picked)
        return made.props("dense outlined options-dense").classes("pick")

    def _linking(self, classes: str) -> Any:
        """HTML whose links to views are followed in place."""
        made = ui.html("", sanitize=False).classes(classes)
        return made.on("click", self._told.followed, js_handler=_FOLLOW)


def _pre(code: str) -> str:
    return f'<pre tabindex="0"><code>{escape(code)}</code></pre>'
