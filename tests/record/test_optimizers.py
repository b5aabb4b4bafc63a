"""Optimizers and ways to train: each exact, or marked with its reason from the right step on.

Every case is recorded, built and opened. Exact means rebuilt: outputs at steps equal the layer's
own weights as the loop kept them. Of a marked layer outputs beyond the mark are refused with the
reason, up to the mark they are answered, and attention weights, top-k and sums are those of the
inputs that the loop itself gave to the layer.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch._inductor.config
from torch import nn

from dualform.client import Client, InvalidArgumentError
from dualform.client import FailedPreconditionError as FailedPrecondition
from dualform.engine import Index, verify_index
from dualform.engine.errors import FailedPreconditionError
from dualform.index import build_index
from dualform.record import Recorder

STEPS, BATCH, D_IN, CLASSES = 24, 16, 12, 3
LAYERS = ("0", "2")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D_IN, 20), nn.ReLU(), nn.Linear(20, CLASSES))


@dataclass(frozen=True)
class Trained:
    """An index, and what the loop itself knows.

    Attributes:
        states: All parameters after 0, 1, ... steps, float64.
        inputs: What layer "0" saw, float32 [STEPS * BATCH, D_IN].
        labels: int64 [STEPS * BATCH].
    """

    path: Path
    states: list[dict[str, np.ndarray]]
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def index(self) -> Index:
        return Index.open(self.path, device="cpu")

    def layer(self, name: str, step: int, queries: np.ndarray) -> np.ndarray:
        state = self.states[step]
        return queries.astype(np.float64) @ state[f"{name}.weight"].T + state[f"{name}.bias"]


Optimizers = Callable[[nn.Sequential], torch.optim.Optimizer]


def sgd(**settings: Any) -> Optimizers:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.05, **settings})


def train(
    path: Path,
    optimizer_of: Optimizers,
    *,
    model: nn.Sequential | None = None,
    running: Callable[[nn.Sequential], nn.Module] = lambda model: model,
    forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    before_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    after_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    scaler: torch.amp.GradScaler | None = None,
    product: torch.dtype | None = None,
) -> Trained:
    """Train a network and index its recording.

    Args:
        running: What is called in the model's place, made before the recorder.
        forward: A context for the forward pass.
        product: What autocast rounds the inputs of products to, which are the keys.
    """
    model = network() if model is None else model
    optimizer = optimizer_of(model)
    dtype = model[0].weight.dtype
    runs = running(model)
    states, inputs, labels = [kept(model)], [], []
    with Recorder(model, optimizer, path / "recording") as recorder:
        for step in range(STEPS):
            x, y = torch.randn(BATCH, D_IN, dtype=dtype), torch.randint(0, CLASSES, (BATCH,))
            inputs.append(x.to(product or dtype).float().numpy())
            labels.append(y.numpy())
            recorder.annotate(label=y)
            optimizer.zero_grad()
            with forward():
                output = runs(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            before_step(step, model)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            after_step(step, model)
            states.append(kept(model))
    build_index(path / "recording", path / "index")
    return Trained(path / "index", states, np.concatenate(inputs), np.concatenate(labels))


def kept(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def assert_exact(trained: Trained) -> None:
    report = verify_index(trained.path)
    assert report.ok
    assert all(each.exact_steps == STEPS for each in report.layers)
    with trained.index as index:
        for name in LAYERS:
            assert index.layers[name].inexact == []
            assert_outputs(trained, index, name, STEPS)


def assert_outputs(trained: Trained, index: Index, name: str, up_to: int) -> None:
    """Outputs at steps up to this one are those of the weights that the loop kept."""
    queries = np.random.default_rng(0).standard_normal((20, index.layers[name].d_in))
    queries = queries.astype(np.float32)
    for step in {0, up_to // 2, up_to}:
        expected = trained.layer(name, step, queries)
        dual = index.dual_output(name, queries, at_step=step).values
        error = np.linalg.norm(dual - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() <= 1e-5, (name, step)


def assert_remainder(trained: Trained, index: Index, name: str, why: str) -> None:
    """The trained layer's output is initial part, rows and remainder; a large one is refused."""
    queries = np.random.default_rng(0).standard_normal((9, index.layers[name].d_in))
    queries = queries.astype(np.float32)
    expected = trained.layer(name, STEPS, queries)
    length = np.linalg.norm(expected, axis=1)
    for group_by in (None, "label"):
        out = index.dual_output(name, queries, group_by=group_by, max_residual=np.inf)
        assert out.residual is not None
        rows = out.values if group_by is None else out.initial + out.values.sum(1)
        assert (np.linalg.norm(rows + out.residual - expected, axis=1) <= 2e-6 * length).all()
    share = float((np.linalg.norm(out.residual, axis=1) / length).max())
    assert index.dual_output(name, queries, max_residual=share * 1.01).residual is not None
    with pytest.raises(FailedPreconditionError, match=re.escape(why)) as refused:
        index.dual_output(name, queries, max_residual=share * 0.99)
    assert refused.value.reason == "RESIDUAL"
    with pytest.raises(FailedPreconditionError, match=re.escape(why)):
        index.explain(name, queries, dual_output=True, max_residual=share * 0.99)
    with Client.local(trained.path, device="cpu") as client:
        told = client.explain({name: queries}, output=True, max_residual=share * 1.01)
        assert told[name].output is not None
        with pytest.raises(InvalidArgumentError, match="goes with output"):
            client.explain({name: queries}, k=1, max_residual=1.0)
    with pytest.raises(FailedPreconditionError, match=re.escape(why)):
        index.top_k(name, queries, 3, rank_by="contribution", unit=0, max_residual=share * 0.99)


def assert_marked(
    trained: Trained, from_step: dict[str, int], reason: str, exact: tuple[str, ...] = ()
) -> None:
    """These layers are marked from these steps on, for this reason; those are exact.

    The trained layer is answered all the same where what no row explains is known, and allowed.
    """
    with trained.index as index:
        for name in exact:
            assert index.layers[name].inexact == []
            assert_outputs(trained, index, name, STEPS)
        for name, first in from_step.items():
            ((step, why),) = index.layers[name].inexact
            assert (step, re.search(reason, why) is not None) == (first, True), why
            queries = np.ones((1, index.layers[name].d_in), np.float32)
            for end in {STEPS, first + 1}:
                with pytest.raises(FailedPreconditionError, match=re.escape(why)) as refused:
                    index.dual_output(name, queries, at_step=end)
                assert refused.value.reason == "INEXACT"
            assert_remainder(trained, index, name, why)
            assert_outputs(trained, index, name, first)
    for each in verify_index(trained.path).layers:
        assert each.exact_steps == from_step.get(each.layer, STEPS)
    assert_weights(trained)


def assert_weights(trained: Trained) -> None:
    """Attention weights, top-k and sums of layer "0" against float64."""
    queries = np.random.default_rng(1).standard_normal((5, D_IN)).astype(np.float32)
    weights = queries.astype(np.float64) @ trained.inputs.T.astype(np.float64)
    with trained.index as index:
        assert index.layers["0"].rows == index.layers["2"].rows == STEPS * BATCH
        hits = index.top_k("0", queries, k=STEPS * BATCH)
        assert np.array_equal(hits.rows[:, 0], weights.argmax(1))
        expected = np.take_along_axis(weights, hits.rows, axis=1)
        # A float32 is within half an ulp of the exact score; the reference has float64's rounding.
        np.testing.assert_allclose(hits.scores, expected, rtol=2.0**-23, atol=1e-14)
        assert (np.diff(hits.scores, axis=1) <= 0).all()
        sums = index.sums("0", queries, "label")
        terms = np.abs(queries.astype(np.float64)) @ np.abs(trained.inputs.T.astype(np.float64))
        for number, label in enumerate(sums.groups.to_pylist()):
            rows = trained.labels == label
            error = np.abs(sums.values[:, number] - weights[:, rows].sum(1))
            assert (error <= 1e-6 * terms[:, rows].sum(1)).all()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
def test_every_kernel_of_sgd(
    tmp_path: Path, kernel: dict[str, bool], settings: dict[str, Any]
) -> None:
    assert_exact(train(tmp_path, sgd(**kernel, **settings)))


@pytest.mark.parametrize("kernel", [{"foreach": False}, {"fused": True}], ids=str)
def test_grad_scaler(tmp_path: Path, kernel: dict[str, bool]) -> None:
    """The fused kernel divides the gradients by the scale itself, inside the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert_exact(train(tmp_path, sgd(momentum=0.9, **kernel), scaler=scaler))


class Lamb(torch.optim.Optimizer):
    """You et al. (2020): Adam's direction, its length set by the weight's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square(), 0.001)
                t = state["step"]
                update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
                trust = p.norm() / update.norm()
                p.sub_(group["lr"] * trust * update)


class SignSGD(torch.optim.SGD):
    """A subclass that steps another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


MUON = hasattr(torch.optim, "Muon")


def muon(model: nn.Sequential) -> torch.optim.Optimizer:
    """Of the weights, as it is for matrices alone; biases stay."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return torch.optim.Muon(weights, lr=0.01)


FAMILIES: dict[str, Optimizers] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01),
    "AMSGrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(
        model.parameters(), lr=0.001, centered=True, momentum=0.9
    ),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exact(tmp_path: Path, name: str) -> None:
    """Outputs, at any step and by group, contributions and verify, of every optimizer family."""
    trained = train(tmp_path, FAMILIES[name])
    assert_exact(trained)
    with trained.index as index:
        for layer in LAYERS:
            queries = np.random.default_rng(1).standard_normal((5, index.layers[layer].d_in))
            queries = queries.astype(np.float32)
            rows = index.layers[layer].rows
            for end in (None, STEPS // 2):
                expected = trained.layer(layer, STEPS if end is None else end, queries)
                parts = index.dual_output(layer, queries, at_step=end, group_by="label")
                total = parts.initial + parts.values.sum(1, dtype=np.float64)
                error = np.linalg.norm(total - expected, axis=1) / np.linalg.norm(expected, axis=1)
                assert error.max() <= 1e-5
                hits = index.top_k(
                    layer, queries, rows, rank_by="contribution", unit=1, at_step=end
                )
                found = np.nansum(hits.scores.astype(np.float64), axis=1) + parts.initial[:, 1]
                np.testing.assert_allclose(found, total[:, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_counts_on_the_device(
    tmp_path: Path, kind: type[torch.optim.Adam], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`capturable`: torch's own arithmetic has float32 factors then, and the ledger says so.

    torch asks for a GPU; that check alone is lifted.
    """
    for name in ("torch.optim.adam", "torch.optim.radam"):
        module = sys.modules[name]
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    for capturable in (True, False):
        path = tmp_path / str(capturable)
        path.mkdir()
        trained = train(
            path, lambda model, c=capturable: kind(model.parameters(), lr=0.01, capturable=c)
        )
        assert_exact(trained)
        # One that has nothing to say is written as older versions read it.
        ledger = pq.read_table(trained.path / "ledger.parquet")
        assert ("float32" in ledger.column_names) == capturable
        assert not capturable or all(ledger.column("float32").to_pylist())


@pytest.mark.parametrize(
    ("name", "optimizer_of"),
    [
        ("Lamb", lambda model: Lamb(model.parameters(), lr=0.01)),
        ("SignSGD", lambda model: SignSGD(model.parameters(), lr=0.01)),
        pytest.param("Muon", muon, marks=pytest.mark.skipif(not MUON, reason="torch has none")),
    ],
)
def test_optimizers_of_no_known_family(tmp_path: Path, name: str, optimizer_of: Optimizers) -> None:
    """All that moved is the remainder: an output is the initial layer's, with what it lacks beside
    it; masks and groups have nothing, and nothing can be ranked by what it added."""
    trained = train(tmp_path, optimizer_of)
    assert_marked(trained, {"0": 0, "2": 0}, rf"^optimizer {name}: .*weights stay exact")
    queries = np.random.default_rng(2).standard_normal((4, D_IN)).astype(np.float32)
    first, last = trained.layer("0", 0, queries), trained.layer("0", STEPS, queries)
    share = float((np.linalg.norm(last - first, axis=1) / np.linalg.norm(last, axis=1)).max())
    with Client.local(trained.path, device="cpu") as client:
        with pytest.raises(FailedPrecondition, match=f"rows leave {share:.2g} of the output"):
            client.dual_output("0", queries)
        for where in (None, "label = 1"):
            out = client.dual_output("0", queries, where=where, max_residual=np.inf)
            np.testing.assert_allclose(out.values, first, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(out.residual, last - first, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(out.trained, last, rtol=1e-5, atol=1e-6)
        parts = client.dual_output("0", queries, group_by="label", max_residual=np.inf)
        assert parts.values.shape == (4, CLASSES, 20)
        assert not parts.values.any()
        with pytest.raises(FailedPrecondition, match="rank by weight"):
            client.top_k("0", queries, k=3, rank_by="contribution", unit=0, max_residual=np.inf)
        with pytest.raises(FailedPrecondition, match="rank by weight"):
            client.top_groups(
                "0", queries, by="label", rank_by="contribution", unit=0, max_residual=np.inf
            )
    for report in verify_index(trained.path).layers:
        assert report.ok
        assert report.output_error is not None
        assert report.output_error > 1e-4
        assert "all that moved is the remainder" in report.note


def test_bf16_autocast(tmp_path: Path) -> None:
    half = torch.bfloat16
    trained = train(tmp_path, sgd(), forward=lambda: torch.autocast("cpu", half), product=half)
    assert_marked(trained, {"0": 0, "2": 0}, r"reduced precision \(autocast\)")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_precisions_are_marked_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    trained = train(tmp_path, sgd(momentum=0.9), model=network().to(dtype))
    word = str(dtype).removeprefix("torch.")
    assert_marked(trained, {"0": 0, "2": 0}, f"^rounded: {word} weights")


@pytest.mark.parametrize("optimizer_of", [sgd(), FAMILIES["AdamW"]], ids=["SGD", "AdamW"])
def test_gradients_averaged_with_another_process(tmp_path: Path, optimizer_of: Optimizers) -> None:
    """As data-parallel training does: what the other's rows moved is the remainder."""

    def average(step: int, model: nn.Sequential) -> None:
        parameters = list(model.parameters())
        x, y = torch.randn(BATCH, D_IN), torch.randint(0, CLASSES, (BATCH,))
        other = copy.deepcopy(model)
        loss = nn.functional.cross_entropy(other(x), y)
        theirs = torch.autograd.grad(loss, list(other.parameters()))
        for parameter, gradient in zip(parameters, theirs, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(gradient).div_(2)

    trained = train(tmp_path, optimizer_of, before_step=average)
    assert_marked(trained, {"0": 0, "2": 0}, "gradient")


def test_clipping_by_value_from_a_step_on(tmp_path: Path) -> None:
    def clip(step: int, model: nn.Sequential) -> None:
        if step >= 7:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)

    trained = train(tmp_path, sgd(momentum=0.9), before_step=clip)
    assert_marked(trained, {"0": 7, "2": 7}, "clipped by value")


def test_clipping_by_a_value_that_nothing_reaches_is_exact(tmp_path: Path) -> None:
    def clip(step: int, model: nn.Sequential) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e3)

    assert_exact(train(tmp_path, sgd(momentum=0.9), before_step=clip))


@pytest.mark.parametrize("copied", [9, 18])
def test_averaged_weights_copied_back(tmp_path: Path, copied: int) -> None:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(
        model[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def follow(step: int, model: nn.Sequential) -> None:
        average.update_parameters(model[0])
        if step == copied:
            model[0].load_state_dict(average.module.state_dict())

    trained = train(tmp_path, sgd(momentum=0.9), model=model, after_step=follow)
    assert_marked(trained, {"0": copied}, "weights changed other than by", exact=("2",))


def test_an_average_kept_beside_is_exact(tmp_path: Path) -> None:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    trained = train(
        tmp_path,
        sgd(momentum=0.9),
        model=model,
        after_step=lambda step, model: average.update_parameters(model),
    )
    assert_exact(trained)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # The compiler reports on itself.
    logging.getLogger("torch").setLevel(logging.ERROR)
    # Plain loops in this process: trying out vectors, and their headers, takes the C++ compiler
    # longer than all that is compiled here.
    plain = {"compile_threads": 1, "cpp.simdlen": 1, "cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(plain):
        yield
    torch._dynamo.reset()


# Dynamo looks at .grad of every tensor that it wraps, and torch warns of its own doing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_models(tmp_path: Path, backend: str, fresh_compiler: None) -> None:
    trained = train(
        tmp_path, sgd(momentum=0.9), running=lambda model: torch.compile(model, backend=backend)
    )
    assert_exact(trained)
    assert_weights(trained)
