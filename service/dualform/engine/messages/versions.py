"""Which version of an index a path means, and what came of looking for others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

from dualform.store.versions import MANIFEST, newest


class Version(NamedTuple):
    """One published index.

    Attributes:
        path: Its directory.
        name: The first digits of its manifest's SHA-256; empty where it has none.
    """

    path: Path
    name: str


class Change(NamedTuple):
    """What came of one thing when a server looked at its configuration again.

    Attributes:
        what: "index NAME", "tokens", "tls", or a key of the configuration.
        outcome: "opened": new, and in force; "kept": as it was; "refused": wrong, and what there
            was before stays; "removed".
        version: Of an index, the one that is served now; empty where none is.
        detail: A sentence.
    """

    what: str
    outcome: Literal["opened", "kept", "refused", "removed"]
    version: str
    detail: str


def version_at(path: Path) -> Version:
    """What to open for a path: an index, or the newest of a folder of indexes.

    Where nothing is complete, the path itself, for whoever opens it to say what is wrong.
    """
    path = newest(path)
    try:
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError:
        digest = ""
    return Version(path.resolve(), digest)
