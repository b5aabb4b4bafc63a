"""The page in the browser: indexes, examples, and what made a prediction; `dualform explore`.

Needs the extra `[explore]`. It asks through the SDK alone. What is behind the names:

    LocalSources     indexes on disk
    ServerSources    those of a server
    load_model       a model of the user's own, to ask about what it is given
    read_names       what output units are called
    run              serve the page on this machine
    View             what is looked at, and its link
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualform.explore.model import Model, load_model
from dualform.explore.scene import read_names
from dualform.explore.sources import LocalSources, ServerSources
from dualform.explore.view import View

__all__ = ["LocalSources", "Model", "ServerSources", "View", "load_model", "read_names", "run"]


def run(
    sources: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    browse: bool = False,
    model: Model | None = None,
    names: Sequence[Sequence[str]] = (),
) -> int:
    """As `dualform.explore.app.run`; the page's library is loaded when it is called."""
    from dualform.explore import app

    return app.run(sources, host=host, port=port, browse=browse, model=model, names=names)
