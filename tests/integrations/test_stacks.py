"""The stacks that people train in, each 20 steps through its own loop with SGD and with AdamW.

Every matrix is recorded or named; outputs are the trained layers', beside the stated residual; the
rows with the largest weights are those of the keys that hooks of the test's own saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.stack_models import Stack, stacks
from dualform.client import Client, capture_queries
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.store.recording import Recording

from .training import accelerate_forgets

__all__ = ["accelerate_forgets"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own
STEPS, EXAMPLES, BEST = 20, 4, 7
STACKS = stacks(tokens=8, pixels=16, batch=3)


@contextmanager
def keys_seen(model: nn.Module) -> Iterator[dict[str, list[np.ndarray]]]:
    """By layer, what it multiplies in each training pass: [rows, d_in]."""
    seen: dict[str, list[np.ndarray]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if name.endswith(".experts"):
                for expert in args[1].unique().tolist():
                    sent = (args[1] == expert).any(1)
                    seen.setdefault(f"{name}.gate_up_proj.{expert}", []).append(
                        copied(args[0][sent])
                    )
            else:
                seen.setdefault(name, []).append(copied(patches(module, args[0])))

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        or type(module).__name__ in ("Conv1D", "MixtralExperts", "MixtralTopKRouter")
    ]
    yield seen
    for handle in handles:
        handle.remove()


def patches(module: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """What a call of a convolution multiplies; of other modules the input as it is."""
    if not isinstance(module, nn.Conv2d):
        return given
    cut = nn.functional.unfold(
        given, module.kernel_size, module.dilation, module.padding, module.stride
    )
    return cut.transpose(1, 2)


def copied(rows: torch.Tensor) -> np.ndarray:
    return rows.detach().reshape(-1, rows.shape[-1]).numpy().copy()


def neither_recorded_nor_named(model: nn.Module, path: Path) -> list[str]:
    """Parameters of two axes or more: each is a layer's weight, or named with a reason."""
    with Recording.open(path) as recording:
        layers = {bare(name) for name in recording.manifest.layers}
        left_out = recording.manifest.left_out
    assert all(left_out)  # reasons
    named = {bare(name) for names in left_out.values() for name in names}
    found = list(model.named_parameters(remove_duplicate=False))
    recorded = {
        id(p)
        for name, p in found
        if name.removesuffix(".weight") in layers or f"{name}.0" in layers  # or an expert's
    }
    return [
        name
        for name, p in found
        if p.dim() > 1 and id(p) not in recorded and not named & {name, name.rpartition(".")[0]}
    ]


def bare(name: str) -> str:
    """A layer's name in the model, which in Lightning's module is called `net`."""
    return name.removeprefix("net.")


def product(model: nn.Module, name: str, x: np.ndarray) -> np.ndarray:
    """A trained layer's output for its own queries, float64: W x + b."""
    if ".experts." in name:
        name, tensor, expert = name.rsplit(".", 2)
        weight = getattr(model.get_submodule(name), tensor)[int(expert)]
        return x.astype(np.float64) @ weight.detach().double().numpy().T
    module = model.get_submodule(name)
    weight = module.weight.detach().double().flatten(1).numpy()
    if not isinstance(module, nn.Embedding) and type(module).__name__ != "Conv1D":
        weight = weight.T
    bias = getattr(module, "bias", None)
    return x.astype(np.float64) @ weight + (0.0 if bias is None else bias.detach().double().numpy())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", STACKS)
def test_recorded_or_named_and_true(tmp_path: Path, name: str, optimizer: str) -> None:
    stack = STACKS[name]
    torch.manual_seed(0)
    model = stack.model(8 if "resnet" in name else 16)
    with keys_seen(model) as seen:
        stack.train(model, optimizer, STEPS, tmp_path / "out", tmp_path / "recording")
    assert neither_recorded_nor_named(model, tmp_path / "recording") == []
    with Recording.open(tmp_path / "recording") as recording:
        assert recording.steps == STEPS
        assert not any(recording.marks.values()), recording.marks
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, [(each.layer, each.note) for each in report.layers if not each.ok]

    with Client.local(tmp_path / "index") as client:
        queries = held_out(stack, model, [bare(name) for name in client.index().layers])
        assert_outputs(client, model, queries)
        assert_top_k(client, queries, seen, STEPS)


def held_out(stack: Stack, model: nn.Module, layers: list[str]) -> Mapping[str, np.ndarray]:
    """What the layers see of examples that training had not, at most 20 rows of each."""
    args, kwargs = stack.given(stack.examples(EXAMPLES, 2))
    queries = capture_queries(model, *args, layers=layers, kwargs=kwargs)
    return {name: found[:: max(1, len(found) // 20)] for name, found in queries.items()}


def assert_outputs(client: Client, model: nn.Module, queries: Mapping[str, np.ndarray]) -> None:
    """Those of the trained layers: 1e-5 beside the residual, which itself is within the default."""
    for layer in client.index().layers:
        x = queries[bare(layer)]
        if not len(x):  # an expert to whom nothing is sent
            continue
        answer = client.dual_output(layer, x)
        right = product(model, bare(layer), x)
        length = np.linalg.norm(right, axis=1)
        assert answer.residual is not None
        beside = np.linalg.norm(answer.values + answer.residual.astype(np.float64) - right, axis=1)
        assert (beside <= 1e-5 * length).all(), (layer, (beside / length).max())


def assert_top_k(
    client: Client,
    queries: Mapping[str, np.ndarray],
    seen: Mapping[str, list[np.ndarray]],
    steps: int,
) -> None:
    """Against all products of the keys that the hooks saw, by (score, row id)."""
    compared = 0
    for layer, index in client.index().layers.items():
        passes = seen.get(bare(layer))
        x = queries[bare(layer)][:3]
        if passes is None or not len(x):  # an embedding, or what lies within experts
            continue
        keys = np.concatenate(passes)
        ids = np.arange(len(keys))
        where = None
        if index.rows > len(keys):  # a tied head: of each step the embedding's rows come first
            where = "use = 'output'"
            rows = len(keys) // steps
            ids += rows * (ids // rows + 1)
        hits = client.top_k(layer, x, k=BEST, where=where)
        weights = (x.astype(np.float64) @ keys.T.astype(np.float64)).astype(np.float32)
        for of_query, rows, scores in zip(weights, hits.rows, hits.scores, strict=True):
            best = np.lexsort((ids, -of_query))[:BEST]
            np.testing.assert_array_equal(rows, ids[best], err_msg=layer)
            np.testing.assert_array_equal(scores, of_query[best])
        compared += 1
    assert compared >= 9
