"""How to add an extra: from wherever this dualform was installed."""

from __future__ import annotations


def pip_install(extra: str) -> str:
    """The command that installs dualform with `[extra]` into this environment, as text to paste.

    pip notes where it took a package from (PEP 610): a checkout or a wheel is named by its path, a
    repository by its address, and what came from an index of packages by its name. Where nothing is
    noted down, as with a checkout that is only on the path, the command is for a checkout's folder.
    """
    import json  # here: only an error needs any of this
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        noted = distribution("dualform").read_text("direct_url.json")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in the folder of a dualform checkout"
    origin = json.loads(noted) if noted else {}
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = url2pathname(urlsplit(url).path)
        editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"
    if url:
        vcs = origin.get("vcs_info", {}).get("vcs")
        return f"pip install 'dualform[{extra}] @ {f'{vcs}+' if vcs else ''}{url}'"
    return f"pip install 'dualform[{extra}]'"
