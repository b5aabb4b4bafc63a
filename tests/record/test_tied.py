"""One table as embedding and head: rows of both uses, against what autograd gives at each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording

from .reading import keys, values

IDS, D, BATCH, TIME = 7, 5, 3, 4


class Model(nn.Module):
    """The gradients at what is looked up, and what the head sees and gets, are kept by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, D, padding_idx=0)
        self.hidden = nn.Linear(D, D)
        self.head = nn.Linear(D, IDS, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: list[dict[str, np.ndarray]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = self.embedding(ids)
        inside = torch.tanh(self.hidden(looked_up))
        output = self.head(inside)
        kept = {"ids": ids.flatten().numpy(), "head keys": inside.detach().flatten(0, 1).numpy()}
        self.seen.append(kept)
        for name, tensor in (("looked up", looked_up), ("head values", output)):
            tensor.register_hook(lambda g, name=name: kept.update({name: -g.flatten(0, 1).numpy()}))
        return output


def train(path: Path, *, elsewhere: int = -1, steps: int = 6) -> Model:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream = torch.Generator().manual_seed(1)
    with Recorder(model, optimizer, path) as recorder:
        for step in range(steps):
            ids = torch.randint(0, IDS, (BATCH, TIME), generator=stream)
            recorder.annotate(label=ids[:, 0])
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(ids).flatten(0, 1), ids.roll(1, 1).flatten()
            ).backward()
            if step == elsewhere:
                model.embedding.weight.square().sum().backward()
            optimizer.step()
    return model


def test_rows_of_both_uses(tmp_path: Path) -> None:
    model = train(tmp_path / "recording")
    with Recording.open(tmp_path / "recording") as recording:
        assert list(recording.manifest.layers) == ["hidden", "head"]
        passes = recording.passes("head")
        for seen, looked_up, head in zip(model.seen, passes[::2], passes[1::2], strict=True):
            sure = seen["ids"] != 0  # padding trains nothing
            ones = (seen["ids"][:, None] == np.arange(IDS)).astype(np.float32) * sure[:, None]
            np.testing.assert_array_equal(keys(recording, "head", looked_up), seen["looked up"])
            np.testing.assert_array_equal(values(recording, "head", looked_up), ones)
            assert looked_up.values is not None
            assert looked_up.values.nbytes == 4 * BATCH * TIME
            np.testing.assert_array_equal(keys(recording, "head", head), seen["head keys"])
            np.testing.assert_array_equal(values(recording, "head", head), seen["head values"])
            for record, use in ((looked_up, "input"), (head, "output")):
                rows = recording.read_rows([record.block])
                assert set(rows["use"].to_pylist()) == {use}
                assert rows["label"].null_count == 0
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report
    query = np.random.default_rng(0).standard_normal((2, D)).astype(np.float32)
    every = np.concatenate(
        [seen[name] for seen in model.seen for name in ("looked up", "head keys")]
    )
    exact = (query.astype(np.float64) @ every.T.astype(np.float64)).astype(np.float32)
    with Client.local(tmp_path / "index") as client:
        hits = client.top_k("head", query, k=9)
        np.testing.assert_array_equal(hits.rows, np.argsort(-exact, axis=1, kind="stable")[:, :9])
        inputs = client.top_k("head", query, k=9, where="use = 'input'")
        assert set(np.asarray(inputs.rows).ravel() // (BATCH * TIME) % 2) == {0}
        parts = client.dual_output("head", query, group_by="use")
        assert list(parts.groups) == ["input", "output"]
        whole = parts.initial + parts.values.sum(1)
        trained = query @ model.head.weight.detach().numpy().T
        np.testing.assert_allclose(whole, trained, rtol=1e-5, atol=1e-5)


def test_a_third_use_is_noticed(tmp_path: Path) -> None:
    train(tmp_path / "recording", elsewhere=3)
    with Recording.open(tmp_path / "recording") as recording:
        (mark,) = recording.marks["head"]
        assert mark.from_step == 3
        assert "do not add up" in mark.reason
        assert not recording.marks["hidden"]


@pytest.mark.parametrize("zeroed", ["between", "after"])
def test_what_is_zeroed_is_no_row(tmp_path: Path, zeroed: str) -> None:
    """Two backwards through one forward are one row, unless the gradient is zeroed between them."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(1, IDS, (BATCH, TIME))
    with Recorder(model, optimizer, tmp_path / "recording"):
        loss = model(ids).square().mean()
        loss.backward(retain_graph=True)
        first = model.seen[0]["looked up"]
        if zeroed == "between":
            optimizer.zero_grad()
        (2 * loss).backward()
        optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not any(recording.marks.values())
        looked_up, _ = recording.passes("head")
        expected = first * (2 if zeroed == "between" else 3)
        np.testing.assert_allclose(keys(recording, "head", looked_up), expected, rtol=1e-6)
        assert values(recording, "head", looked_up).sum() == BATCH * TIME


def test_untied_later_the_head_goes_on_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for step in range(4):
            if step == 2:
                model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())
            optimizer.zero_grad()
            model(torch.randint(1, IDS, (BATCH, TIME))).square().mean().backward()
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not recording.marks["head"]
        assert [record.step for record in recording.passes("head")] == [0, 0, 1, 1, 2, 3]
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok


class WithPlaces(Model):
    """Its inputs are the tokens' vectors and their places', which the whole batch shares."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(TIME, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])[None]
        inside = torch.tanh(self.hidden(self.embedding(ids) + self.place(places)))
        return self.head(inside.flatten(0, 1))


def test_annotation_of_both_uses_and_of_rows_that_a_batch_shares(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithPlaces()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        recorder.annotate(label=[10, 20, 30])
        model(torch.randint(1, IDS, (BATCH, TIME))).square().mean().backward()
        optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        rows = {
            name: recording.read_rows([record.block for record in recording.passes(name)])
            for name in ("head", "hidden", "place")
        }
    each = [label for label in (10, 20, 30) for _ in range(TIME)]
    assert rows["hidden"]["label"].to_pylist() == each
    assert rows["hidden"]["use"].to_pylist() == [None] * BATCH * TIME
    assert rows["head"]["label"].to_pylist() == each * 2  # looked up, and as the head sees them
    assert rows["head"]["use"].to_pylist() == ["input"] * len(each) + ["output"] * len(each)
    assert rows["place"]["label"].to_pylist() == [None] * TIME


def test_a_column_of_the_users_with_that_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(2):
            recorder.annotate(**({"use": [1, 2, 3]} if step == 0 else {"label": [1, 2, 3]}))
            optimizer.zero_grad()
            model(torch.randint(1, IDS, (BATCH, TIME))).square().mean().backward()
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        rows = recording.read_rows([record.block for record in recording.passes("head")])
    given = [use for use in (1, 2, 3) for _ in range(TIME)] * 2
    assert rows["use"].to_pylist() == given + [None] * len(given)


def test_rows_that_are_left_out(tmp_path: Path) -> None:
    """Padding has a value of zeros, whichever place a token has; masks hold for both uses."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[0, 1, 2, 0], [3, 0, 4, 5], [1, 1, 6, 0]])
    with Recorder(model, optimizer, tmp_path / "recording", zero_rows=False) as recorder:
        for step in range(2):
            recorder.annotate(label=ids, rows=ids != 1 if step else None)
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    trained = [1, 2, 3, 4, 5, 1, 1, 6]
    with Recording.open(tmp_path / "recording") as recording:
        passes = recording.passes("head")
        labels = [recording.read_rows([record.block])["label"].to_pylist() for record in passes]
        kept = [2, 3, 4, 5, 6]
        assert labels[0] == trained
        assert labels[1] == ids.flatten().tolist()  # the head's own rows have values all
        assert labels[2] == kept
        assert labels[3] == [i for i in ids.flatten().tolist() if i != 1]
        np.testing.assert_array_equal(values(recording, "head", passes[2]), np.eye(IDS)[kept])
        assert keys(recording, "head", passes[2]).any(1).all()
        (mark,) = recording.marks["head"]
        assert mark.from_step == 1
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok
