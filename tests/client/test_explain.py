"""`explain`: several layers and answers in one call, the same as one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualform.client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from dualform.serve import ServerLimits

from .serving import serving
from .test_answers import assert_same


@pytest.fixture(scope="module")
def digits(digits_index: Path) -> Iterator[str]:
    with serving({"digits": digits_index}) as address:
        yield address


@pytest.fixture(scope="module")
def asked(digits: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    with Client(digits) as client:
        layers = client.index().layers
    return {
        name: rng.random((5, layer.d_in), np.float32)
        for name, layer in reversed(list(layers.items()))
    }


def test_every_way_gives_what_single_questions_give(
    digits: str, digits_index: Path, asked: dict[str, np.ndarray]
) -> None:
    async def other() -> list[Any]:
        answers = []
        for client in (AsyncClient(digits), AsyncClient.local(digits_index)):
            async with client:
                answers.append(await client.explain(asked, k=4, group_by="label", output=True))
        return answers

    with Client(digits) as client, Client.local(digits_index) as local:
        ways = [each.explain(asked, k=4, group_by="label", output=True) for each in (client, local)]
        for way in [*ways, *asyncio.run(other())]:
            assert list(way) == list(asked)
            for layer, queries in asked.items():
                assert_same(way[layer].top_k, client.top_k(layer, queries, k=4))
                assert_same(way[layer].sums, client.sums(layer, queries, group_by="label"))
                output = client.dual_output(layer, queries, group_by="label")
                np.testing.assert_allclose(way[layer].output.values, output.values, atol=1e-5)
                np.testing.assert_array_equal(way[layer].output.initial, output.initial)
        whole = client.explain(asked, k=None, output=True, where="label < 5")
        for layer, queries in asked.items():
            assert (whole[layer].top_k, whole[layer].sums) == (None, None)
            output = client.dual_output(layer, queries, where="label < 5")
            np.testing.assert_allclose(whole[layer].output.values, output.values, atol=1e-5)


def test_large_batches_go_in_parts(digits_index: Path, asked: dict[str, np.ndarray]) -> None:
    first, *_ = asked
    uneven = {**asked, first: np.concatenate([asked[first]] * 5)}
    limits = ServerLimits(max_queries=4, max_message_mib=1, max_k=1500)
    with (
        serving({"digits": digits_index}, limits=limits) as address,
        Client(address) as client,
        Client.local(digits_index) as local,
    ):
        # 1,500 rows of three layers fill a message: even four queries are too many at a time.
        parts = client.explain(uneven, k=1500, group_by="label")
        whole = local.explain(uneven, k=1500, group_by="label")
        for layer in uneven:
            assert_same(parts[layer].top_k, whole[layer].top_k)
            np.testing.assert_allclose(parts[layer].sums.values, whole[layer].sums.values)
        with pytest.raises(ResourceExhaustedError) as caught:
            client.explain(uneven, k=1501)
        assert caught.value.field == "k"


def test_what_is_wrong_is_said(digits: str, asked: dict[str, np.ndarray]) -> None:
    first = next(iter(asked))
    with Client(digits) as client:
        for ask, field, message in (
            (({},), "layers", "name at least one"),
            ((asked[first],), "queries", "by layer"),
            (({first: asked[first][:, :3]},), "queries", f"layer '{first}'"),
            (({first: asked[first][:0]},), "queries", "empty batch"),
        ):
            with pytest.raises(InvalidArgumentError, match=message) as caught:
                client.explain(*ask)
            assert caught.value.field == field
        for named, field in (
            ({"k": None}, "k"),
            ({"k": -1}, "k"),
            ({"absolute": True}, "absolute"),
            ({"group_by": "lable"}, "group_by"),
            ({"where": "lable = 6"}, "where"),
            ({"order": "best"}, "order"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                client.explain(asked, **named)
            assert caught.value.field == field
        with pytest.raises(NotFoundError, match="nope"):
            client.explain({"nope": asked[first]})
