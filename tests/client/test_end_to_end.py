"""The whole road on real digits: train, record, build, serve, capture, ask; and the pages' code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digits
import numpy as np
import pytest
import torch
import warm
from torch import nn

from dualform.client import Client, capture_queries
from dualform.index import build_index

from .serving import serving

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Trained:
    """A folder with runs/digits and indexes/digits, the model, and where its memory is served."""

    folder: Path
    model: nn.Sequential
    address: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("digits")
    model = digits.record(folder / "runs" / "digits")
    build_index(folder / "runs" / "digits", folder / "indexes" / "digits")
    with serving({"digits": folder / "indexes" / "digits"}) as address:
        yield Trained(folder, model, address)


def test_the_dual_output_is_the_layers_own(trained: Trained) -> None:
    images = digits.load().images[:50]
    queries = capture_queries(trained.model, images)
    with Client(trained.address) as client, torch.no_grad():
        hidden = images
        for place, layer in enumerate(trained.model):
            seen, hidden = hidden, layer(hidden)
            if not isinstance(layer, nn.Linear):
                continue
            np.testing.assert_array_equal(queries[str(place)], seen.numpy())
            output = client.dual_output(str(place), queries[str(place)])
            expected = hidden.numpy()
            error = np.linalg.norm(output.values - expected, axis=1) / np.linalg.norm(
                expected, axis=1
            )
            # Momentum 0.9: design, rule 5.
            assert error.max() <= 1e-4
            parts = client.dual_output(str(place), queries[str(place)], group_by="label")
            whole = parts.initial + parts.values.sum(axis=1)
            assert np.abs(whole - output.values).max() <= 1e-4 * np.abs(expected).max()


def test_payloads_come_back_by_example(trained: Trained) -> None:
    data = digits.load()
    queries = capture_queries(trained.model, data.images[:30], layers="0")
    with Client(trained.address) as client:
        where = "example in (0, 3, 6, 9) and step < 60"
        hits = client.top_k("0", queries["0"], k=4, where=where)
        for row, example in zip(hits.rows.ravel(), hits["example"].ravel(), strict=True):
            assert (example is None) == (row < 0)
            assert example is None or example in (0, 3, 6, 9)
        payloads = client.examples([0, 1, 3])
    assert payloads == [f"digit {data.labels[0]}", None, f"digit {data.labels[3]}"]


def test_the_pages_code_runs(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.folder)
    images = digits.load().images[:3]
    space: dict[str, Any] = {"model": trained.model, "images": images}
    # Of getting started, where sdk.md goes on.
    space |= {"points": images, "validation": torch.arange(3)}
    for page in ("dual-form.md", "sdk.md"):
        for language, code in blocks(page):
            assert language == "python"
            exec(compile(code.replace("localhost:50051", trained.address), page, "exec"), space)
    for layer, queries in space["queries"].items():
        np.save(f"q{layer}.npy", queries)
    torch.save((trained.model, images), "model.pt")
    Path("train.py").write_text(
        "import torch\n\ndef trained():\n    return torch.load('model.pt', weights_only=False)\n"
    )
    ran = 0
    for language, code in blocks("cli.md"):
        assert language == "bash"
        for line in code.strip().splitlines():
            # Built and served already.
            if line.startswith(("dualform index build", "dualform serve")):
                continue
            words = line.replace("localhost:50051", trained.address).removeprefix("dualform")
            done = warm.run("dualform", *shlex.split(words))
            assert done.returncode == 0, (line, done.stderr)
            ran += 1
    assert ran == 12


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of each python and bash block of a page."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
