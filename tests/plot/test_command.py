"""`dualform plot`: every figure in every format, and how bad input ends."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from cli.conftest import Done, dualform
from client.serving import serving

from dualform import plot
from dualform.client import Client, InvalidArgumentError

from .memory import TEXT_PAYLOAD, WITHOUT_PAYLOAD, Pictures, png


def draw(kind: str, pictures: Pictures, files: dict[str, Path], layers: str, *more: object) -> Done:
    asked = [word for each in layers for word in ("--layer", each, "--query", files[each])]
    return dualform("plot", kind, "--local", pictures.path, *asked, *more)


def check_format(path: Path) -> None:
    """It is what its ending says, and has something in it."""
    data = path.read_bytes()
    if path.suffix == ".png":
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 500
        assert height > 200
    elif path.suffix == ".svg":
        root = ElementTree.fromstring(data)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10
    else:
        assert data[:5] == b"%PDF-"
        assert data.rstrip().endswith(b"%%EOF")


@pytest.fixture(scope="module")
def served(pictures: Pictures) -> Iterator[str]:
    """HOST:PORT of a server with that index alone."""
    with serving({"pictures": pictures.path}) as address:
        yield address


@pytest.mark.parametrize(
    ("kind", "layers", "ending", "more"),
    [
        ("attention", "02", "png", ["--per-group", "5", "--tasks", "later,early"]),
        ("sums", "024", "svg", ["--signed", "--where", "label < 5"]),
        ("matches", "0", "pdf", ["-k", "2", "--where", "example not in (7, 8)"]),
        ("profile", "4", "pdf", ["--bins", "4", "--number", "2"]),
        ("contributions", "4", "png", ["--units", "0,9", "--at-step", "6"]),
    ],
)
def test_figures_are_written(
    pictures: Pictures,
    query_files: dict[str, Path],
    tmp_path: Path,
    kind: str,
    layers: str,
    ending: str,
    more: list[str],
) -> None:
    out = tmp_path / f"{kind}.{ending}"
    image = tmp_path / "q.png"
    image.write_bytes(png(pictures.pixels[1700]))
    if kind == "matches":
        more = [*more, "--image", str(image)]
    done = draw(kind, pictures, query_files, layers, "--out", out, *more)
    assert (done.status, done.out, done.err) == (0, f"{out}\n", "")
    check_format(out)


def test_a_server_gives_the_same_picture(
    pictures: Pictures, query_files: dict[str, Path], tmp_path: Path
) -> None:
    with serving({"pictures": pictures.path}) as address:
        done = dualform(
            "plot",
            "sums",
            *("--server", address, "--index", "pictures"),
            *("--layer", 0, "--query", query_files["0"], "--out", tmp_path / "remote.png"),
        )
        assert done.status == 0, done.err
    draw("sums", pictures, query_files, "0", "--out", tmp_path / "local.png")
    assert (tmp_path / "remote.png").read_bytes() == (tmp_path / "local.png").read_bytes()


def test_bad_input_ends_with_a_message(
    pictures: Pictures, query_files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "f.png"

    def complaint(kind: str, layers: str, *more: object) -> str:
        done = draw(kind, pictures, query_files, layers, *more)
        assert (done.status, done.out) == (2, "")
        assert not out.exists()
        return done.err

    assert "ends in .png, .svg or .pdf" in complaint("sums", "0", "--out", tmp_path / "f.jpg")
    folder = tmp_path / "none" / "f.png"
    assert "the folder" in complaint("sums", "0", "--out", folder)
    assert "holds queries 0 to 2" in complaint("sums", "0", "--out", out, "--number", "3")
    assert "a layer is named twice" in complaint("sums", "00", "--out", out)
    assert "each layer needs" in complaint("sums", "0", "--out", out, "--layer", "2")
    assert "shows one layer" in complaint("contributions", "04", "--out", out)
    assert "holds what is no number" in complaint(
        "contributions", "4", "--units", "a", "--out", out
    )
    assert "no payload of example 7" in complaint(
        "matches", "0", "--out", out, "--where", f"example = {WITHOUT_PAYLOAD}"
    )
    assert "is text, not an image" in complaint(
        "matches", "0", "--out", out, "--where", f"example = {TEXT_PAYLOAD}"
    )
    assert "no layer '9'" in complaint(
        "sums", "", "--layer", "9", "--query", query_files["0"], "--out", out
    )


def test_passages_go_to_the_terminal_or_to_a_page(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    passage = {"before": "the fox and ", "token": "the", "after": " crow", "score": 2.5}
    path.write_text(json.dumps({"passages": [passage]}))
    done = dualform("plot", "passages", path)
    assert (done.status, done.out) == (0, "1  score 2.5\nthe fox and [[the]] crow\n")
    page = tmp_path / "p.html"
    assert dualform("plot", "passages", path, "--out", page).out == f"{page}\n"
    assert "the fox and <mark>the</mark> crow" in page.read_text()
    wrong = dualform("plot", "passages", path, "--out", tmp_path / "p.png")
    assert (wrong.status, wrong.out) == (2, "")
    assert "written as .html" in wrong.err
    missing = dualform("plot", "passages", tmp_path / "none.json")
    assert missing.status == 2
    assert "none.json" in missing.err


@pytest.mark.parametrize("ending", plot.FORMATS)
def test_save_writes_what_the_ending_says(
    client: Client, pictures: Pictures, tmp_path: Path, ending: str
) -> None:
    figure = plot.contributions(client, "4", pictures.queries["4"][0])
    path = tmp_path / f"figure{ending.upper()}"
    plot.save(figure, path)
    again = path.rename(tmp_path / f"figure{ending}")
    check_format(again)
    for wrong in ("figure", "figure.jpeg", ".png"):
        with pytest.raises(InvalidArgumentError, match=r"ends in \.png, \.svg or \.pdf"):
            plot.save(figure, tmp_path / wrong)
    assert sorted(each.name for each in tmp_path.iterdir()) == [again.name]


def test_saving_twice_gives_the_same_bytes(
    client: Client, pictures: Pictures, tmp_path: Path
) -> None:
    figure = plot.sums(client, pictures.one(0, "0"))
    for ending in plot.FORMATS:
        written = []
        for name in ("a", "b"):
            plot.save(figure, tmp_path / f"{name}{ending}")
            written.append((tmp_path / f"{name}{ending}").read_bytes())
        assert np.array_equal(written[0], written[1]), ending


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "qtagg", "none"])
def test_a_notebooks_backend_does_not_matter(
    served: str, query_files: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    out = tmp_path / "sums.png"
    asked = ["--server", served, "--layer", 0, "--query", query_files["0"]]
    done = dualform("plot", "sums", *asked, "--out", out, MPLBACKEND=backend)
    assert done.status == 0, done.err
    check_format(out)


def test_figures_name_a_backend_that_does_not_start() -> None:
    program = """
from dualform import plot
from dualform.client import FailedPreconditionError
try:
    plot.sums(None, {})
except FailedPreconditionError as error:
    assert "unset MPLBACKEND" in str(error), error
    print("said")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "no backend"},
    )
    assert done.stdout == "said\n", done.stderr
