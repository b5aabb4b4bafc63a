"""Which version of an index a path means, and what came of looking for others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"


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

    The newest is the one whose manifest was written last; a manifest is what is written last. Of
    two written at the same time it is the later name. Where nothing is complete, the path itself,
    for whoever opens it to say what is wrong.
    """
    if not (path / _MANIFEST).is_file() and path.is_dir():
        complete = [
            (child.stat().st_mtime_ns, child.parent.name, child.parent)
            for child in path.glob(f"*/{_MANIFEST}")
            if child.is_file()
            and not child.parent.name.startswith(".")
            and not child.parent.name.endswith(_PARTIAL)
        ]
        if complete:
            path = max(complete)[2]
    try:
        digest = hashlib.sha256((path / _MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError:
        digest = ""
    return Version(path.resolve(), digest)
