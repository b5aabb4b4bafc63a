"""A served index: how a version of it is opened, and what became of that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dualform.engine.api.index import Index
from dualform.engine.api.opened import refusals
from dualform.engine.devices.devices import Devices
from dualform.engine.errors import (
    DataLossError,
    EngineError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    ran_out_of_memory,
)
from dualform.engine.messages.versions import Version, version_at
from dualform.questions.quoted import unicode
from dualform.store.errors import DamagedError, StoreError, TooManyFilesError, VersionError
from dualform.store.errors import NotFoundError as StoreNotFoundError
from dualform.store.versions import Use, is_followed
from dualform.v1 import attribution_pb2 as pb

_LOG = logging.getLogger("dualform.engine")
_LOOKS = 5


class Opener(Protocol):
    """Opens indexes: here, or on several machines."""

    def open(self, version: Version) -> Index:
        """Open this version of an index.

        Raises:
            EngineError, dualform.store.StoreError: It cannot be opened.
        """

    def close(self) -> None:
        """Nothing is opened any more, and what was is closed."""


class Here:
    """Opens indexes in this process.

    Args:
        devices: Where their rows may lie beside the host's memory.
        use_faiss: Whether FAISS proposes top-k rows; answers are the same without.
    """

    def __init__(self, devices: Devices, use_faiss: bool = True) -> None:
        self._devices, self._use_faiss = devices, use_faiss

    def open(self, version: Version) -> Index:
        """See Opener."""
        return Index.open(version.path, devices=self._devices, use_faiss=self._use_faiss)

    def close(self) -> None:
        """See Opener."""


class Entry:
    """One name: an open index, or why there is none."""

    def __init__(self, version: Version, index: Index | None, error: EngineError | None) -> None:
        self.version = version
        self.index = index
        self.error = error
        self._files = {} if index is None else index.identities()

    def is_unchanged(self) -> bool:
        """Whether its files are those that were there when it was opened."""
        return self.index is not None and self.index.identities() == self._files

    @property
    def reason(self) -> str | None:
        """What is wrong with it, whether or not some questions are answered; valid Unicode."""
        trouble = None if self.index is None else self.index.trouble
        found = self.damage or trouble
        return None if found is None else unicode(found)

    @property
    def damage(self) -> str | None:
        if self.error is not None:
            return str(self.error)
        return None if self.index is None else self.index.damage

    @property
    def health(self) -> pb.Health:
        return pb.HEALTH_SERVING if self.reason is None else pb.HEALTH_DAMAGED


def opened_entry(name: str, path: Path, opener: Opener, before: Index | None = None) -> Entry:
    """Open what a path means, or say why it cannot be opened: never an error.

    Args:
        name: It is served under.
        path: An index, or a folder of versions.
        opener: Opens it.
        before: The version that was served; files that it shares are not read again.
    """
    version, use = _used(path)
    path = version.path
    try:
        with errors_translated():
            index = opener.open(version)
        index.version, index.use = version.name, use
        if before is not None:
            index.adopt(before)
        return Entry(version, index, None)
    except EngineError as error:
        return Entry(version, None, error.detached())
    except (OSError, ValueError) as error:
        return Entry(version, None, DataLossError(f"{path} cannot be opened: {error}"))
    except Exception as error:
        # One index must never keep the others from being served.
        _LOG.exception("index %s at %s cannot be opened", name, unicode(str(path)))
        return Entry(version, None, DataLossError(f"{path} cannot be opened: {error!r}"))


def _used(path: Path) -> tuple[Version, Use | None]:
    """What a path means; a version of a folder that such are published into as they come is kept
    from being removed, as long as it is used."""
    for _ in range(_LOOKS):
        version = version_at(path)
        if version.path == path.resolve() or not is_followed(version.path.parent):
            return version, None
        try:
            return version, Use(version.path)
        except FileNotFoundError:  # removed just now: there is a newer one
            continue
    return version_at(path), None


@contextmanager
def errors_translated() -> Iterator[None]:
    """Make the engine's refusals of what is wrong with a question, a file or the memory."""
    try:
        with refusals():
            yield
    except DamagedError as error:
        raise DataLossError(str(error)) from error
    except VersionError as error:
        raise FailedPreconditionError(str(error), reason="NEWER_VERSION") from error
    except StoreNotFoundError as error:
        raise NotFoundError(str(error), reason="UNKNOWN_INDEX") from error
    except TooManyFilesError as error:
        raise ResourceExhaustedError(str(error), reason="TOO_MANY_FILES") from error
    except StoreError as error:
        raise FailedPreconditionError(str(error)) from error
    except (MemoryError, RuntimeError, OSError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ResourceExhaustedError(
            "there is not enough memory for this answer; ask for less at a time: fewer queries, a "
            "smaller k, fewer groups",
            reason="OUT_OF_MEMORY",
        ) from None
