"""Which version of an index a path means, and whether it is the one that is open."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

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
