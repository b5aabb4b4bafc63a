"""timm's Lion and LAMB: parts add up to the weights that they made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import numpy as np
import pytest
import torch

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.optimizers import family_of

from .test_families import assert_parts_add_up, change
from .training import train

pytest.importorskip("timm")
from timm.optim.lamb import Lamb
from timm.optim.lion import Lion

OWN = {"max_grad_norm": None}
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (Lion, {}),
    (Lion, {"weight_decay": 0.1, "betas": (0.95, 0.98)}),
    (Lamb, OWN),
    (Lamb, {**OWN, "weight_decay": 0.0}),
    (Lamb, {**OWN, "weight_decay": 0.0, "always_adapt": True, "trust_clip": True}),
    (Lamb, {**OWN, "grad_averaging": False, "bias_correction": False}),
    (Lamb, {**OWN, "decoupled_decay": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=lambda given: getattr(given, "__name__", given)
)
def test_parts_add_up(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], foreach: bool
) -> None:
    if "foreach" not in inspect.signature(kind).parameters:
        pytest.skip("this timm has one kernel")
    for seed, before in ((0, 0), (1, 0), (2, 7)):
        view, runs = train(
            lambda groups: kind(groups, lr=0.03, foreach=foreach, **settings),  # type: ignore[call-arg]
            seed,
            before=before,
            change=change,
        )
        assert (view.why_not, view.name) == (None, kind.__name__)
        assert_parts_add_up(view, runs)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (Lamb, {}, "max_grad_norm=None"),
        (Lamb, {**OWN, "caution": True}, "caution=True"),
        (Lamb, {**OWN, "corrected_weight_decay": True}, "corrected_weight_decay=True"),
        (Lion, {"caution": True}, "caution=True"),
        (Lion, {"betas": (0.9, 0.0)}, "second beta is 0"),
    ],
)
def test_what_is_not_followed_is_said(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], why: str
) -> None:
    found = family_of(kind([torch.zeros(2, 2, requires_grad=True)], lr=0.01, **settings))  # type: ignore[call-arg]
    assert found.family.name == "unknown"
    assert found.why_not is not None
    assert why in found.why_not


def test_subclasses_count_as_what_they_derive_from_unless_they_step() -> None:
    class Thin(Lion):
        pass

    class Steps(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            pass

    parameters = [torch.zeros(2, 2, requires_grad=True)]
    found = family_of(Thin(parameters))
    assert (found.family.name, found.name, found.why_not) == ("lion", "Lion", None)
    found = family_of(Steps(parameters))
    assert found.family.name == "unknown"
    assert found.why_not is not None
    assert "overrides the step of timm.optim.Lion" in found.why_not


@pytest.mark.parametrize(
    "make", [lambda p: Lion(p, lr=1e-3, weight_decay=0.1), lambda p: Lamb(p, lr=1e-2, **OWN)]
)
def test_from_the_loop_to_the_answer(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """In float32: outputs by class, with the initial part, and contributions are the layer's."""
    model = digits.record(tmp_path / "recording", make=lambda model: make(model.parameters()))
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok
    with Index.open(tmp_path / "index", device="cpu") as index:
        for name, layer in index.layers.items():
            assert layer.inexact == []
            queries = np.random.default_rng(0).standard_normal((4, layer.d_in), np.float32)
            with torch.no_grad():
                trained = model[int(name)](torch.from_numpy(queries)).double().numpy()
            parts = index.dual_output(name, queries, group_by="label")
            total = parts.initial + parts.values.sum(1, dtype=np.float64)
            length = np.linalg.norm(trained, axis=1)
            assert (np.linalg.norm(total - trained, axis=1) <= 1e-5 * length).all()
            hits = index.top_k(name, queries, layer.rows, rank_by="contribution", unit=1)
            found = hits.scores.astype(np.float64).sum(1) + parts.initial[:, 1]
            np.testing.assert_allclose(found, total[:, 1], rtol=1e-4, atol=1e-5)
