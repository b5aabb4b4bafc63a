"""From the loop to the answer under every optimizer, with settings that change while it trains.

Random networks are trained by random optimizers: schedules that move lr and betas at every step, lr
as a tensor, fused and foreach kernels, clipping, accumulation, a layer that is frozen or left out,
a group that is added late, a grad scaler that skips, a state that was loaded. Parts, initial part
and remainder are the layer that the loop kept; the remainder is what float32 rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from soak.counts import count
from torch import nn

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import Recorder

from .test_whole_path import WITHOUT_EXPLAIN

BATCH, CLASSES, QUERIES = 12, 3, 6
OF_TERMS, OF_UPDATE = 1e-6, 1e-5
_UNIT = 2.0**-24

Make = Callable[..., torch.optim.Optimizer]

# Each with settings of its own to draw from; lr comes on top.
OPTIMIZERS: dict[str, tuple[Make, dict[str, list[Any]]]] = {
    "SGD": (torch.optim.SGD, {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]}),
    "Adam": (torch.optim.Adam, {"amsgrad": [False, True], "weight_decay": [0.0, 0.1]}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": [False, True], "weight_decay": [0.0, 0.1]}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": [False, True], "weight_decay": [0.1]}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": [0.0, 0.1]}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": [0.0, 0.1]}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": [0.0, 0.1], "weight_decay": [0.0, 0.1]}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": [0.0, 0.1]}),
    "Adafactor": (torch.optim.Adafactor, {"weight_decay": [0.0, 0.1]}),
    "Rprop": (torch.optim.Rprop, {}),
}
# Of SGD with momentum a first step that is skipped leaves torch memory that nobody filled.
FUSED = ("Adam", "AdamW", "Adagrad")
BETAS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
LR = {"SGD": 0.1, "Adadelta": 1.0}  # of the others 0.01


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A name, and how the optimizer is made."""
    name = draw(st.sampled_from(sorted(OPTIMIZERS)))
    chosen = {key: draw(st.sampled_from(values)) for key, values in OPTIMIZERS[name][1].items()}
    kernel = draw(st.sampled_from(["loop", "foreach", *(["fused"] if name in FUSED else [])]))
    chosen |= {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}
    lr: Any = LR.get(name, 0.01)
    if name in ("Adam", "AdamW") and kernel == "loop" and draw(st.booleans()):
        lr = torch.tensor(lr)
    return name, {**chosen, "lr": lr, "maximize": draw(st.booleans())}


class Loop:
    """A network and its training.

    Attributes:
        started: Weights and biases when the recorder began, by name, float64.
    """

    def __init__(self, data: st.DataObject, name: str, made: dict[str, Any]) -> None:
        torch.manual_seed(data.draw(st.integers(0, 2**31)))
        self.name = name
        self.maximize = made["maximize"]
        widths = [data.draw(st.integers(3, 8)) for _ in range(2)]
        self.model = nn.Sequential(
            nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], CLASSES)
        )
        self.late = data.draw(st.booleans())
        first = self.model[2 if self.late else 0 :].parameters()
        self.optimizer = OPTIMIZERS[name][0](list(first), **made)
        self.schedule = data.draw(st.sampled_from(["none", "decay", "one cycle"]))
        self.clip = data.draw(st.sampled_from([None, 0.5]))
        self.accumulate = data.draw(st.sampled_from([1, 2]))
        self.scaler = None
        if data.draw(st.booleans()):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.random = np.random.default_rng(0)
        self.step = 0

    def train(self, steps: int, annotate: Callable[..., None], events: list[str]) -> None:
        """So many steps; `events` says what happens at each."""
        for happens in events[:steps]:
            if happens == "group" and self.late:
                self.optimizer.add_param_group({"params": list(self.model[0].parameters())})
                self.late = False
            self._schedule()
            layer = self.model[0]
            layer.requires_grad_(happens != "frozen")
            self.model.zero_grad()  # of what the optimizer does not hold too
            for _ in range(self.accumulate):
                x = torch.randn(BATCH, layer.in_features)
                y = torch.from_numpy(self.random.integers(0, CLASSES, BATCH))
                annotate(label=y)
                loss = nn.functional.cross_entropy(self.model(x), y) / self.accumulate
                loss = -loss if self.maximize else loss
                if happens == "overflow" and self.scaler is not None:
                    loss = loss * float("inf")
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if happens == "left out":
                layer.zero_grad(set_to_none=True)
            self._take()
            layer.requires_grad_(True)

    def _schedule(self) -> None:
        """What torch's schedulers do to groups."""
        self.step += 1
        for group in self.optimizer.param_groups:
            if self.schedule == "decay":
                group["lr"] = group["lr"] * 0.95
            elif self.schedule == "one cycle":
                at = np.sin(self.step / 5)
                group["lr"] = float(group["lr"]) * float(1 + 0.1 * at)
                if self.name in BETAS:
                    group["betas"] = (0.9 - 0.05 * float(at), group["betas"][1])

    def _take(self) -> None:
        if self.scaler is None:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            return
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: p.detach().double().numpy() for name, p in self.model.named_parameters()}


HAPPENS = [*["nothing"] * 6, "frozen", "left out", "group", "overflow"]


@settings(max_examples=count(12, 1500), deadline=None, phases=WITHOUT_EXPLAIN)
@given(optimizers(), st.data())
def test_parts_and_remainder_are_the_layer(
    optimizer: tuple[str, dict[str, Any]], data: st.DataObject
) -> None:
    loop = Loop(data, *optimizer)
    steps = data.draw(st.integers(4, 30))
    before = data.draw(st.sampled_from([0, 0, 5]))  # its state is there when recording begins
    events = data.draw(st.lists(st.sampled_from(HAPPENS), min_size=steps, max_size=steps))
    loop.train(before, lambda **columns: None, ["nothing"] * before)
    started = loop.weights()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        names = ["2"] if loop.late else ["0", "2"]
        with Recorder(loop.model, loop.optimizer, path / "recording", layers=names) as recorder:
            loop.train(steps, recorder.annotate, events)
        build_index(path / "recording", path / "index")
        report = verify_index(path / "index")
        assert report.ok, [(layer.layer, layer.note) for layer in report.layers]
        event(f"{loop.name}: {len(names)} layers")
        with Index.open(path / "index", device="cpu") as index:
            for name in names:
                assert index.layers[name].inexact == []
                check(index, name, loop, started, steps)


def check(index: Index, name: str, loop: Loop, started: dict[str, np.ndarray], steps: int) -> None:
    ended = loop.weights()
    weight, bias = f"{name}.weight", f"{name}.bias"
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((QUERIES, index.layers[name].d_in), np.float32)
    x = queries.astype(np.float64)
    trained = x @ ended[weight].T + ended[bias]
    parts = index.dual_output(name, queries, group_by="label", max_residual=np.inf)
    assert parts.residual is not None
    total = parts.initial + parts.values.sum(1, dtype=np.float64) + parts.residual
    terms = np.abs(parts.initial) + np.abs(parts.values).sum(1, dtype=np.float64) + np.abs(trained)
    assert (np.abs(total - trained) <= OF_TERMS * terms).all()
    moved = x @ (ended[weight] - started[weight]).T + ended[bias] - started[bias]
    # Every step rounds the weights once, whatever it moved them by.
    rounding = steps * _UNIT * (np.abs(x) @ np.abs(ended[weight]).T + np.abs(ended[bias]))
    allowed = OF_UPDATE * np.linalg.norm(moved, axis=1) + np.linalg.norm(rounding, axis=1)
    assert (np.linalg.norm(parts.residual, axis=1) <= allowed).all(), (loop.name, name)
