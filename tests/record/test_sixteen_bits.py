"""Under autocast, keys and values are the 16-bit numbers that the products had, and stay that.

What they are comes from below autograd and autocast: a dispatch mode keeps what every product was
given, a hook on every product's result its gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import LSTM, Recorder
from dualform.store import IndexManifest
from dualform.store.recording import Recording

from . import reading

STEPS, BATCH = 12, 16
HALVES = [torch.bfloat16, torch.float16]
Forward = Callable[[int], contextlib.AbstractContextManager[Any]]


class Products(TorchDispatchMode):
    """Keeps the left factor of every product with a bias, as the kernel got it."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.keys.append(args[1].clone())
        return func(*args, **(kwargs or {}))


class Seen:
    """What the products of a layer had, step by step: keys [BATCH, d_in], values [BATCH, d_out]."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []


def record(
    path: Path,
    forward: Forward,
    *,
    dtype: torch.dtype = torch.float32,
    widths: tuple[int, int, int] = (12, 20, 3),
    backwards: int = 1,
) -> tuple[nn.Sequential, dict[str, Seen]]:
    """Train two layers by AdamW; `forward` gives the context of a step's forward pass."""
    torch.manual_seed(0)
    d_in, hidden, classes = widths
    model = nn.Sequential(nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, classes)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {"0": Seen(), "2": Seen()}

    def see(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: seen[name].values.append(-grad))

        return hook

    with Recorder(model, optimizer, path / "recording") as recorder:
        for name in seen:
            model[int(name)].register_forward_hook(see(name))
        for step in range(STEPS):
            x, y = torch.randn(BATCH, d_in, dtype=dtype), torch.randint(0, classes, (BATCH,))
            recorder.annotate(label=y)
            optimizer.zero_grad()
            with forward(step), Products() as products:
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            for i in range(backwards):
                loss.backward(retain_graph=i + 1 < backwards)
            for layer, key in zip(seen.values(), products.keys, strict=True):
                layer.keys.append(key)
            optimizer.step()
    return model, seen


def autocast(dtype: torch.dtype) -> Forward:
    return lambda step: torch.autocast("cpu", dtype)


def assert_recorded(path: Path, seen: dict[str, Seen]) -> None:
    """Every pass has the very numbers, in the type that the product had."""
    with Recording.open(path / "recording") as recording:
        for name, layer in seen.items():
            passes = recording.passes(name)
            assert len(passes) == STEPS
            for item, key, value in zip(passes, layer.keys, layer.values, strict=True):
                assert item.values is not None
                for span, stored, expected in (
                    (item.keys, recording.stored_keys(item), key),
                    (item.values, recording.stored_values(item), value),
                ):
                    assert span.encoding == str(expected.dtype).removeprefix("torch.")
                    bits = expected.view(torch.int16 if expected.itemsize == 2 else torch.int32)
                    np.testing.assert_array_equal(stored.view(bits.numpy().dtype), bits.numpy())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_answers_are_from_the_numbers_that_training_had(tmp_path: Path, dtype: torch.dtype) -> None:
    model, seen = record(tmp_path, autocast(dtype))
    assert {key.dtype for layer in seen.values() for key in layer.keys} == {dtype}
    assert_recorded(tmp_path, seen)
    build_index(tmp_path / "recording", tmp_path / "index")
    name_of = str(dtype).removeprefix("torch.")
    report = verify_index(tmp_path / "index")
    assert report.damage == ()
    with Index.open(tmp_path / "index", device="cpu") as index:
        for name, layer in seen.items():
            assert index.layers[name].manifest.encodings == (name_of, name_of)
            keys = torch.cat(layer.keys).double().numpy()
            queries = np.random.default_rng(0).standard_normal((3, keys.shape[1]), np.float32)
            exact = queries.astype(np.float64) @ keys.T
            hits = index.top_k(name, queries, 10)
            order = np.argsort(-exact, axis=1, kind="stable")[:, :10]
            np.testing.assert_array_equal(hits.rows, order)
            best = np.take_along_axis(exact, order, 1)
            np.testing.assert_array_equal(hits.scores, best.astype(np.float32))
            out = index.dual_output(name, queries, max_residual=np.inf)
            assert out.residual is not None
            with torch.no_grad():
                trained = model[int(name)](torch.from_numpy(queries)).double().numpy()
            length = np.linalg.norm(trained, axis=1)
            whole = out.values.astype(np.float64) + out.residual
            assert (np.linalg.norm(whole - trained, axis=1) <= 1e-6 * length).all()
            # The gradient was computed in 16 bits: said, and not put on any row.
            share = np.linalg.norm(out.residual, axis=1) / length
            assert ((share > 1e-7) & (share < 0.02)).all()


def test_a_pass_in_another_type_loses_nothing(tmp_path: Path) -> None:
    """Each pass says its own encoding; the index of such a layer is float32."""
    types = [torch.bfloat16] * 4 + [torch.float32] * 4 + [torch.float16] * 4

    def forward(step: int) -> contextlib.AbstractContextManager[Any]:
        if types[step] is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast("cpu", types[step])

    _, seen = record(tmp_path, forward)
    assert [key.dtype for key in seen["2"].keys] == types
    assert_recorded(tmp_path, seen)
    build_index(tmp_path / "recording", tmp_path / "index")
    with Index.open(tmp_path / "index", device="cpu") as index:
        for name, layer in seen.items():
            assert index.layers[name].manifest.encodings == ("float32", "float32")
            keys = torch.cat([key.float() for key in layer.keys]).double().numpy()
            chunks = index.stream_weights(name, np.eye(keys.shape[1], dtype=np.float32))
            found = np.concatenate([chunk.weights for chunk in chunks], axis=1)
            np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(keys.T, axis=1))


def test_two_backwards_through_one_forward_add_up_in_float32(tmp_path: Path) -> None:
    _, seen = record(tmp_path, autocast(torch.bfloat16), backwards=2)
    with Recording.open(tmp_path / "recording") as recording:
        for name, layer in seen.items():
            pairs = zip(layer.values[::2], layer.values[1::2], strict=True)
            for item, (one, two) in zip(recording.passes(name), pairs, strict=True):
                assert item.values is not None
                assert (item.keys.encoding, item.values.encoding) == ("bfloat16", "float32")
                expected = (one.float() + two.float()).numpy()
                np.testing.assert_array_equal(reading.values(recording, name, item), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weights_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """A model that is 16 bits throughout: no autocast, and marked for its rounded weights."""
    _, seen = record(tmp_path, lambda step: contextlib.nullcontext(), dtype=dtype)
    assert {key.dtype for key in seen["0"].keys} == {dtype}
    assert_recorded(tmp_path, seen)
    with Recording.open(tmp_path / "recording") as recording:
        (mark,) = recording.marks["0"]
        assert mark.from_step == 0
        assert "weights, which every step rounds; keys and values are as they were" in mark.reason


def test_half_the_disk(tmp_path: Path) -> None:
    """Where records are a page or more, as they are padded to one."""
    widths = 512, 512, 512
    sizes = {}
    for name, forward in (
        ("float32", lambda step: contextlib.nullcontext()),
        ("bfloat16", autocast(torch.bfloat16)),
    ):
        record(tmp_path / name, forward, widths=widths)
        build_index(tmp_path / name / "recording", tmp_path / name / "index")
        for what, names in (("recording", ["*.bin"]), ("index", ["*keys.faiss", "*values.npy"])):
            files = [file for glob in names for file in (tmp_path / name / what).rglob(glob)]
            sizes[name, what] = sum(file.stat().st_size for file in files)
    assert sizes["float32", "recording"] > 1e6
    assert sizes["bfloat16", "recording"] <= 0.5 * sizes["float32", "recording"]
    headers = 4 * 128
    assert sizes["bfloat16", "index"] <= 0.5 * sizes["float32", "index"] + headers


def test_the_other_kinds_of_layers(tmp_path: Path) -> None:
    """An LSTM's joined keys and a convolution's patches."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv1d(3, 5, 3), "lstm": LSTM(5, 4), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patches, joined = [], []
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(3):
            x = torch.randn(4, 3, 8)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                h = model["conv"](x).transpose(1, 2)
                out, _ = model["lstm"](h)
                loss = nn.functional.cross_entropy(model["head"](out[:, -1]), torch.arange(4) % 2)
            loss.backward()
            optimizer.step()
            patches.append(x.to(torch.bfloat16).unfold(2, 3, 1).transpose(1, 2).reshape(-1, 9))
            before = torch.cat([torch.zeros(4, 1, 4), out[:, :-1].float()], 1)
            joined.append(torch.cat([before.bfloat16(), h.bfloat16()], 2).reshape(-1, 9))
    with Recording.open(tmp_path / "recording") as recording:
        for name, expected in (("conv", patches), ("lstm", joined)):
            for item, keys in zip(recording.passes(name), expected, strict=True):
                assert item.values is not None
                assert {item.keys.encoding, item.values.encoding} == {"bfloat16"}
                found = recording.stored_keys(item).view(np.int16)
                np.testing.assert_array_equal(found, keys.detach().view(torch.int16).numpy())
    build_index(tmp_path / "recording", tmp_path / "index")
    layers = IndexManifest.load(tmp_path / "index").layers
    assert {layer.encodings for layer in layers.values()} == {("bfloat16", "bfloat16")}
