"""A request message in, a response message out: what the server and the SDK's local mode share."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from dualform.engine.api.index import Index
from dualform.engine.devices.devices import Devices
from dualform.engine.errors import (
    CancelledError,
    DataLossError,
    EngineError,
    InvalidArgumentError,
    NotFoundError,
)
from dualform.engine.memory.layer import resident
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.messages import answers, responses
from dualform.engine.messages.batching import answer_together
from dualform.engine.messages.limits import Limits
from dualform.engine.messages.opening import Entry, Here, Opener, errors_translated, opened_entry
from dualform.engine.messages.versions import Change, version_at
from dualform.engine.messages.writing import size
from dualform.questions import (
    AttributeQuestion,
    ExamplesQuestion,
    ExplainQuestion,
    IndexesQuestion,
    IndexQuestion,
    OutputQuestion,
    Question,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
    question_of,
)
from dualform.questions.placement import GPU_MEMORY
from dualform.questions.quoted import unicode
from dualform.store.versions import is_followed, newest
from dualform.v1 import attribution_pb2 as pb

__all__ = ["Catalog", "Limits"]

_Answer: TypeAlias = Callable[[Any, Any, Stop | None], Any]

_LOG = logging.getLogger("dualform.engine")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Catalog:
    """The indexes that are served, by name. Thread-safe.

    Args:
        paths: Index directories, or folders of them, whose newest is served. One that cannot be
            opened stays listed as damaged, with the reason; the others answer.
        limits: What one request may ask for.
        device, gpu_memory: As `Index.open` takes them; the indexes share the devices.
        devices: In place of these two.
        use_faiss: Whether FAISS proposes top-k rows; answers are the same without.
        opener: Opens them; None for `Here` with these devices and FAISS. Closed with the catalog.

    Raises:
        ValueError: No index at all, a name that is not letters, digits, "_", ".", "-", or a device
            that is none, or not there.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        *,
        limits: Limits | None = None,
        device: str | Sequence[str] = "auto",
        gpu_memory: float | str = GPU_MEMORY,
        devices: Devices | None = None,
        use_faiss: bool = True,
        opener: Opener | None = None,
    ) -> None:
        _check_names(paths)
        self.limits = limits or Limits()
        if devices is None:
            devices = Devices.find(device, gpu_memory) if opener is None else Devices()
        self.devices = devices
        self._opener = opener or Here(self.devices, use_faiss)
        self._reloading = threading.Lock()
        # Replaced as a whole, never changed: whoever reads it sees one state.
        self._entries: Mapping[str, Entry] = {
            name: self._opened(name, Path(path)) for name, path in paths.items()
        }
        self._paths = {name: Path(path) for name, path in paths.items()}
        self._refused: dict[str, Path] = {}

    @property
    def opener(self) -> Opener:
        """Who opens the indexes."""
        return self._opener

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def damage(self, name: str) -> str | None:
        """What is wrong with an index, or None. Knows what was met so far; `verify` looks."""
        entry = self._entries.get(name)
        return "it is served no more" if entry is None else entry.damage

    def reason(self, name: str) -> str | None:
        """The same, or why some questions to it are refused: rows that are nowhere."""
        entry = self._entries.get(name)
        return "it is served no more" if entry is None else entry.reason

    def look_again(self, stop: Stop | None = None) -> None:
        """Find out whether rows that were nowhere are there again."""
        for entry in self._entries.values():
            if entry.index is not None and entry.index.trouble is not None:
                with suppress(EngineError):
                    entry.index.look_again(stop)

    def version(self, name: str) -> str:
        """Which version of an index is served; empty where none is."""
        entry = self._entries.get(name)
        return "" if entry is None else entry.version.name

    def resident(self, name: str) -> float:
        """The share of an index's keys that is in the page cache, between 0 and 1."""
        entry = self._entries.get(name)
        layers = [] if entry is None or entry.index is None else entry.index.layers.values()
        sizes = [(layer.rows * layer.key_bytes, resident(layer)) for layer in layers]
        return sum(size * share for size, share in sizes) / max(1, sum(size for size, _ in sizes))

    def reload(self, paths: Mapping[str, Path], stop: Stop | None = None) -> list[Change]:
        """Serve these indexes from now on: what is new is opened and checked, then all switch.

        Answers that are being computed end on the version that they began with, whose maps are
        released then. Where a new version is damaged, the old one stays. An index whose files were
        written again or replaced, with the same content even, is opened anew.

        Args:
            paths: As for the class.
            stop: Returns True once nobody wants it any more; nothing changes then.

        Returns:
            What came of each index.

        Raises:
            ValueError: As for the class; nothing has changed.
        """
        _check_names(paths)
        with self._reloading:
            old = self._entries
            new: dict[str, Entry] = {}
            changes = [
                Change(f"index {name}", "removed", "", f"index {name} is served no more")
                for name in old
                if name not in paths
            ]
            for name, path in paths.items():
                new[name], change = self._renewed(name, old.get(name), Path(path), stop)
                changes.append(change)
            if stop is None or not stop():
                self._entries = new
                self._paths = {name: Path(path) for name, path in paths.items()}
            return changes

    def take_newer(self, stop: Stop | None = None) -> list[Change]:
        """Serve the newest versions of folders that versions are published into as they come.

        As `reload` does; a newest version that was refused is not tried again.

        Args:
            stop: As for `reload`.

        Returns:
            What came of those that there are newer versions of.
        """
        changes: list[Change] = []
        with self._reloading:
            new = dict(self._entries)
            for name, path in self._paths.items():
                found = newest(path) if is_followed(path) else None
                if found is None or found.resolve() in (
                    self._entries[name].version.path,
                    self._refused.get(name),
                ):
                    continue
                new[name], change = self._renewed(name, self._entries[name], path, stop)
                if change.outcome == "refused":
                    self._refused[name] = found.resolve()
                changes.append(change)
            if changes and (stop is None or not stop()):
                self._entries = new
        return changes

    def _renewed(
        self, name: str, old: Entry | None, path: Path, stop: Stop | None
    ) -> tuple[Entry, Change]:
        what, version = f"index {name}", version_at(path)
        sound = old is not None and old.damage is None and old.is_unchanged()
        if old is not None and sound and old.version == version:
            return old, Change(
                what, "kept", version.name, f"{what} is version {version.name} still"
            )
        entry = self._opened(name, path, None if old is None or not sound else old.index)
        version = entry.version
        if isinstance(entry.error, NotFoundError) and self._paths.get(name) == path:
            entry.error = DataLossError(
                f"{path} was served and is no index any more: reload the server when it is there "
                "again (is its disk mounted?)"
            )
        if entry.index is not None:
            with suppress(DataLossError, CancelledError):  # `damage` says it
                entry.index.verify_files(stop)
        if entry.damage is None:
            detail = f"{what} is now version {version.name} from {version.path}"
            return entry, Change(what, "opened", version.name, detail)
        if old is not None and sound:
            before = old.version
            detail = f"{what} stays at version {before.name} from {before.path}: {entry.damage}"
            return old, Change(what, "refused", before.name, detail)
        return entry, Change(what, "refused", "", f"{what} cannot be served: {entry.damage}")

    def _opened(self, name: str, path: Path, before: Index | None = None) -> Entry:
        return opened_entry(name, path, self._opener, before)

    def verify(self, name: str, stop: Stop | None = None) -> str | None:
        """Hash every file of an index that is open; `damage` then tells what was found.

        Args:
            name: One of `names`.
            stop: Returns True once nobody wants to know any more.

        Returns:
            What is wrong, of files too that answers go without; None where nothing was found.
        """
        entry = self._entries.get(name)
        index = None if entry is None else entry.index
        if index is None:
            return None
        try:
            index.verify_files(stop)
        except CancelledError as error:
            _LOG.debug("checking the files of index %s ended: %s", name, error)
        except DataLossError as error:
            _LOG.warning("index %s: %s", name, unicode(str(error)))
            return str(error)
        return None

    def answer(self, request: Any, stop: Stop | None = None) -> Any:
        """Answer a question, or a request message of `dualform.v1.AttributionService`.

        Args:
            request: Any of them but those whose answers come in parts.
            stop: Returns True once nobody waits for the answer; asked between tiles.

        Returns:
            The response message that belongs to the request's type.

        Raises:
            EngineError: The subclass says which gRPC code it is.
            TypeError: Not a request of this service.
        """
        with errors_translated():
            response = self._answered(request, stop)
            check_stop(stop)
        self.limits.check_answer(size(response), "ask for less at a time")
        return response

    def answer_together(self, requests: Sequence[Any], stop: Stop | None = None) -> list[Any]:
        """Answer requests that differ in nothing but their queries, each as `answer` would.

        Args:
            requests: TopKRequests, TopGroupsRequests, SumsRequests or DualOutputRequests.
            stop: Returns True once nobody waits for any of the answers.

        Returns:
            A response message or an EngineError for each.

        Raises:
            EngineError: What is wrong with all of them.
        """
        with errors_translated():
            index = self._open_index(requests[0].index)
            found = answer_together(index, requests, self.limits, stop)
        for response in found:
            if not isinstance(response, EngineError):
                response.index_version = index.version
        return found

    def stream(self, request: Any, stop: Stop | None = None) -> Iterator[Any]:
        """Answer a request whose answer comes in parts: a StreamWeightsQuestion or its message.

        Args:
            request: What is checked before this returns.
            stop: As for `answer`.

        Returns:
            Response messages, computed as they are asked for; each may raise EngineError.

        Raises:
            EngineError: The subclass says which gRPC code it is.
        """
        with errors_translated():
            parts = self._answered(request, stop)

        def translated() -> Iterator[Any]:
            while True:
                with errors_translated():
                    part = next(parts, None)
                if part is None:
                    return
                yield part

        return translated()

    def close(self) -> None:
        """Close every index. Nothing may be answering any more."""
        with self._reloading:
            entries = self._entries
        for entry in entries.values():
            if entry.index is not None:
                entry.index.close()
        self._opener.close()
        self.devices.close()

    def _answered(self, request: Any, stop: Stop | None) -> Any:
        if isinstance(request, Question):
            question = request
        else:
            if getattr(request, "index", ""):
                self._find(request.index)  # before its queries are unpacked
            question = question_of(request)
        return _ANSWERS[type(question)](self, question, stop)

    def _list_indexes(self, question: IndexesQuestion, stop: Stop | None) -> pb.ListIndexesResponse:
        return pb.ListIndexesResponse(
            indexes=[
                pb.IndexSummary(
                    name=name,
                    health=entry.health,
                    health_reason=entry.reason or "",
                    version=entry.version.name,
                )
                for name, entry in self._entries.items()
            ],
            limits=self._limits_message(),
        )

    def _get_index(self, question: IndexQuestion, stop: Stop | None) -> pb.GetIndexResponse:
        name, entry = self._find(question.index or "")
        info = pb.IndexInfo(
            name=name,
            health=entry.health,
            health_reason=entry.reason or "",
            version=entry.version.name,
        )
        index = entry.index
        if index is not None:
            info.steps = index.steps
            info.optimizer = index.optimizer
            if (sampling := responses.sampling(index.sampling)) is not None:
                info.sampling.CopyFrom(sampling)
            info.layers.extend(
                responses.layer_info(layer, self.devices.residences(layer))
                for layer in index.layers.values()
            )
            info.devices.extend(map(responses.device_info, self.devices.states()))
        return pb.GetIndexResponse(index=info, limits=self._limits_message())

    def _limits_message(self) -> pb.Limits:
        return pb.Limits(
            max_k=self.limits.max_k,
            max_queries=self.limits.max_queries,
            max_message_bytes=self.limits.max_message_bytes,
        )

    def _find(self, name: str) -> tuple[str, Entry]:
        entries = self._entries
        served = ", ".join(entries)
        if not name:
            if len(entries) > 1:
                raise InvalidArgumentError(
                    f"several indexes are served; name one of them: {served}", field="index"
                )
            name = next(iter(entries))
        entry = entries.get(name)
        if entry is None:
            raise NotFoundError(
                f"no index {name!r} is served; there are: {served}",
                field="index",
                reason="UNKNOWN_INDEX",
            )
        return name, entry

    def _open_index(self, name: str) -> Index:
        name, entry = self._find(name)
        if entry.error is not None:
            raise type(entry.error)(
                f"index {name!r} is not served: {entry.error}", reason=entry.error.reason
            )
        if entry.index is None or entry.damage is not None:
            raise DataLossError(f"index {name!r} is damaged: {entry.damage}")
        return entry.index


def _of_one_index(answer: Callable[[Index, Any, Limits, Stop | None], Any]) -> _Answer:
    def answered(catalog: Catalog, question: Any, stop: Stop | None) -> Any:
        index = catalog._open_index(question.index or "")
        response = answer(index, question, catalog.limits, stop)
        response.index_version = index.version
        return response

    return answered


def _in_parts(catalog: Catalog, question: StreamWeightsQuestion, stop: Stop | None) -> Any:
    index = catalog._open_index(question.index or "")
    parts = answers.stream_weights(index, question, catalog.limits, stop)

    def versioned() -> Iterator[Any]:
        for part in parts:
            part.index_version = index.version
            yield part

    return versioned()


# How each kind of question is answered.
_ANSWERS: dict[type[Question], _Answer] = {
    IndexesQuestion: Catalog._list_indexes,
    IndexQuestion: Catalog._get_index,
    TopKQuestion: _of_one_index(answers.about_rows),
    TopGroupsQuestion: _of_one_index(answers.about_rows),
    AttributeQuestion: _of_one_index(answers.attribute),
    SelfInfluenceQuestion: _of_one_index(answers.self_influence),
    SumsQuestion: _of_one_index(answers.about_rows),
    OutputQuestion: _of_one_index(answers.about_rows),
    ExplainQuestion: _of_one_index(answers.explain),
    StreamWeightsQuestion: _in_parts,
    ExamplesQuestion: _of_one_index(answers.examples),
}


def _check_names(paths: Mapping[str, Path]) -> None:
    if not paths:
        raise ValueError("no index to serve; name at least one")
    for name in paths:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name an index: at most 100 letters, digits, '_', '.' and '-' "
                "are allowed; say NAME=PATH"
            )
