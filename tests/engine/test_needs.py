"""What an answer is estimated to take is no less than what it takes, in a process of its own."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from synthetic import make_index
from torch import nn

from dualform.index import build_index, pack_index
from dualform.record import Recorder

ROWS, D = 15_000, 16
WIDE_ROWS, DISTINCT, WIDE = 10_000, 1_000, 256

CODE = """
import gc, sys, threading, time
from dualform.serve import policy
policy.apply(1)
import ctypes
import numpy as np
from dualform.client import parse_filter
from dualform.engine.api.index import Index
from dualform.engine.messages import answers, needs
from dualform.engine.messages.limits import Limits
from dualform.engine.messages.writing import write
from dualform.questions import (
    AttributedLayer, AttributeQuestion, ExplainQuestion, OutputQuestion, StreamWeightsQuestion,
    SelfInfluenceQuestion, SumsQuestion, TopGroupsQuestion, TopKQuestion,
)
from dualform.serve.memory import anonymous_bytes

limits = Limits(max_message_mib=1024)
index = Index.open(sys.argv[1])
d, d_out = index.layers["fc"].d_in, index.layers["fc"].d_out
some = np.random.default_rng(0).standard_normal((300, d)).astype(np.float32)
same = np.zeros((300, d), np.float32)

def one(name, estimate, answer):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = most = anonymous_bytes()
    over = threading.Event()
    def watch():
        nonlocal most
        while not over.wait(0.0005):
            most = max(most, anonymous_bytes())
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    found = answer()
    data = found if isinstance(found, list) else write(found)
    over.set()
    watching.join()
    print(name, most - before, estimate)

def rows(name, question):
    one(name, needs.of_rows(index, question),
        lambda: answers.about_rows(index, question, limits, None))

def attribute(name, queries, inputs, by, k):
    of = None if inputs == len(queries) else np.sort(np.arange(len(queries)) % inputs)
    layer = AttributedLayer("fc", queries, queries[:, :d_out], of)
    question = AttributeQuestion((layer,), inputs, by=by, k=k, max_residual=1e9)
    one(name, needs.of_attribute(index, question),
        lambda: answers.attribute(index, question, limits, None))

def self_influence(name, by):
    question = SelfInfluenceQuestion("fc", by)
    one(name, needs.of_self_influence(index, question, index.group_count("fc", by, "by")),
        lambda: answers.self_influence(index, question, limits, None))

rows("warm", TopKQuestion("fc", some[:2], k=3))
"""

ANY = """
for kind, queries in (("some", some), ("same", same)):
    rows(f"top-k-{kind}", TopKQuestion("fc", queries[:100], k=50))
    rows(f"top-k-scan-{kind}", TopKQuestion("fc", queries[:100], k=50, strategy="scan"))
    rows(f"groups-{kind}", TopKQuestion("fc", queries[:32], k=20, group_by="label"))
    rows(f"large-k-{kind}", TopKQuestion("fc", queries[:2], k=16000))
rows("sums", SumsQuestion("fc", some, group_by="label", strategy="scan"))
rows("many-groups", SumsQuestion("fc", some[:32], group_by="single"))
rows("bins", SumsQuestion("fc", some[:4], group_by="single",
    bins=tuple(np.linspace(0, 30000, 200000).tolist())))
for kind, queries in (("some", some), ("same", same)):
    rows(f"top-groups-{kind}", TopGroupsQuestion("fc", queries, "single", k=50))
    rows(f"top-groups-label-{kind}", TopGroupsQuestion("fc", queries, "label", k=5))
    rows(f"top-groups-scan-{kind}", TopGroupsQuestion("fc", queries, "label", strategy="scan"))
    rows(f"top-groups-large-k-{kind}", TopGroupsQuestion("fc", queries[:9], "single", k=16000))
    ask = {"rank_by": "contribution", "max_residual": 1e9}
    rows(f"top-groups-unit-{kind}", TopGroupsQuestion("fc", queries, "single", unit=1, **ask))
    rows(f"top-groups-direction-{kind}",
        TopGroupsQuestion("fc", queries, "single", direction=queries[:, :d_out], **ask))
    attribute(f"attribute-{kind}", queries, 300, "single", 50)
    attribute(f"attribute-places-{kind}", queries, 20, "single", 5)
    attribute(f"attribute-few-places-{kind}", queries, 100, "label", 5)
    attribute(f"attribute-all-{kind}", queries, 300, "single", None)
    rows(f"cosine-{kind}", TopKQuestion("fc", queries[:100], k=50, rank_by="cosine"))
    rows(f"top-groups-cosine-{kind}",
        TopGroupsQuestion("fc", queries, "single", k=50, rank_by="cosine"))
rows("output", OutputQuestion("fc", some, max_residual=1e9))
rows("output-groups", OutputQuestion("fc", some, group_by="label", max_residual=1e9))
rows("output-step", OutputQuestion("fc", some, at_step=30, max_residual=1e9))
rows("contribution", TopKQuestion("fc", some[:100], k=20, rank_by="contribution", unit=1,
    max_residual=1e9))
rows("direction", TopKQuestion("fc", some[:100], k=20, rank_by="contribution",
    direction=some[:100, :d_out], max_residual=1e9))
explained = ExplainQuestion((("fc", some),), k=20, group_by="label", output=True)
one("explain", needs.of_explain(index, explained),
    lambda: answers.explain(index, explained, limits, None))
for by in ("single", "label", "place"):
    self_influence(f"self-influence-{by}", by)
stream = StreamWeightsQuestion("fc", some)
one("stream", needs.of_stream(index, stream),
    lambda: [len(p.SerializeToString())
             for p in answers.stream_weights(index, stream, limits, None)])

# Rows of one shard, with sketches, whose keys come again.
index = Index.open(sys.argv[2])
d, d_out = index.layers["fc"].d_in, index.layers["fc"].d_out
some = np.random.default_rng(0).standard_normal((32, d)).astype(np.float32)
same = np.zeros((32, d), np.float32)
rows("wide-warm", TopKQuestion("fc", some[:2], k=3))
for kind, queries in (("some", some), ("same", same)):
    for strategy in ("certified", "distinct_keys", "scan"):
        rows(f"wide-{strategy}-{kind}", TopKQuestion("fc", queries, k=500, strategy=strategy))
    for order in ("largest", "absolute"):
        ask = {"rank_by": "contribution", "strategy": "certified", "order": order}
        rows(f"wide-unit-{order}-{kind}",
            TopKQuestion("fc", queries, k=20, unit=1, max_residual=1e9, **ask))
        rows(f"wide-direction-{order}-{kind}", TopKQuestion("fc", queries, k=20,
            direction=some[:, :d_out], max_residual=1e9, **ask))
"""

FOLLOWED = """
for kind, queries in (("some", some), ("same", same)):
    for unit in (1, 2):
        rows(f"contribution-{kind}-{unit}", TopKQuestion("fc", queries[:5], k=50,
            rank_by="contribution", unit=unit, max_residual=1e9))
    rows(f"contribution-groups-{kind}", TopKQuestion("fc", queries[:5], k=50, group_by="label",
        distinct="single", rank_by="contribution", unit=1, max_residual=1e9))
    rows(f"direction-{kind}", TopKQuestion("fc", queries[:20], k=50, rank_by="contribution",
        direction=np.ones((20, 8), np.float32), max_residual=1e9))
    ask = {"rank_by": "contribution", "max_residual": 1e9}
    rows(f"top-groups-unit-{kind}", TopGroupsQuestion("fc", queries[:20], "single", unit=3, **ask))
    rows(f"top-groups-direction-{kind}", TopGroupsQuestion("fc", queries[:20], "single",
        direction=np.ones((20, 8), np.float32), **ask))
    attribute(f"attribute-{kind}", queries[:20], 20, "single", 5)
    attribute(f"attribute-places-{kind}", queries[:20], 4, "single", 5)
for step in (None, 30):
    rows(f"output-{step}", OutputQuestion("fc", some, where=parse_filter("label != 3"),
        at_step=step, max_residual=1e9))
    rows(f"output-groups-{step}", OutputQuestion("fc", some, group_by="label", at_step=step,
        max_residual=1e9))
"""

PACKED = """
for strategy in ("certified", "scan"):
    rows(f"top-k-{strategy}", TopKQuestion("fc", some[:20], k=100, strategy=strategy))
rows("sums", SumsQuestion("fc", some[:20], group_by="label", strategy="scan"))
for unit in (1, 2):
    rows(f"contribution-{unit}", TopKQuestion("fc", some[:5], k=20, rank_by="contribution",
        unit=unit, max_residual=1e9))
rows("direction", TopKQuestion("fc", some[:20], k=20, rank_by="contribution",
    direction=some[:20, :d_out], max_residual=1e9))
few = parse_filter("label != 3")
rows("output", OutputQuestion("fc", some[:20], where=few, max_residual=1e9))
rows("output-groups", OutputQuestion("fc", some[:20], group_by="label", max_residual=1e9))
attribute("attribute", some[:20], 20, "label", 5)
stream = StreamWeightsQuestion("fc", some[:20])
one("stream", needs.of_stream(index, stream),
    lambda: [len(p.SerializeToString())
             for p in answers.stream_weights(index, stream, limits, None)])
rows("again", TopKQuestion("fc", some[:20], k=1))
"""

MANY = """
explained = ExplainQuestion(tuple((name, some[:80]) for name in index.layers), group_by="single")
one("explain", needs.of_explain(index, explained),
    lambda: answers.explain(index, explained, limits, None))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_estimates_are_upper_bounds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    index = make_index(
        tmp_path,
        rng.standard_normal((ROWS, D)).astype(np.float32),
        rng.standard_normal((ROWS, 8)).astype(np.float32),
        rows_per_step=500,
        label=(np.arange(ROWS) % 7).tolist(),
        single=np.arange(ROWS).tolist(),
        place=(np.arange(ROWS) // 250).tolist(),
    )
    # Keys near a plane of a few dimensions, so that sketches of them say something.
    plane = rng.standard_normal((DISTINCT, 8)) @ rng.standard_normal((8, WIDE))
    keys = plane + 0.01 * rng.standard_normal(plane.shape)
    wide = make_index(
        tmp_path / "wide",
        keys.astype(np.float32)[np.arange(WIDE_ROWS) % DISTINCT],
        rng.standard_normal((WIDE_ROWS, 16)).astype(np.float32),
        rows_per_step=500,
    )
    measured = assert_upper_bounds(ANY, index, wide)
    assert len(measured) > 30
    # And no fantasies: what takes most is foreseen within an order of magnitude or so.
    name, took, estimate = max(measured, key=lambda line: int(line[1]))
    assert int(estimate) < 30 * int(took), name


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_so_are_those_of_layers_that_are_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc=nn.Linear(D, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for ids in torch.arange(ROWS).split(500):
            recorder.annotate(label=ids % 7, single=ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(500, D)), ids % 8).backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    assert len(assert_upper_bounds(FOLLOWED, tmp_path / "index")) > 10


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_so_is_that_of_an_answer_of_many_layers(tmp_path: Path) -> None:
    """Most of what it takes is the message, and what is written of it."""
    torch.manual_seed(0)
    names = ["fc", *(f"l{number}" for number in range(29))]
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for ids in torch.arange(3000).split(500):
            recorder.annotate(single=ids)
            optimizer.zero_grad()
            inputs = torch.randn(500, 8)
            sum(layer(inputs) for layer in model.values()).square().mean().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    (_, (_, took, _)) = assert_upper_bounds(MANY, tmp_path / "index")
    assert int(took) > 2 * 8 * 80 * 3000 * len(names)  # message and bytes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_so_are_those_of_packed_indexes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plane = np.maximum(rng.standard_normal((WIDE_ROWS, 8)) @ rng.standard_normal((8, WIDE)), 0)
    index = make_index(
        tmp_path,
        plane.astype(np.float32),
        rng.standard_normal((WIDE_ROWS, WIDE)).astype(np.float32),
        rows_per_step=500,
        label=(np.arange(WIDE_ROWS) % 7).tolist(),
    )
    pack_index(index, tmp_path / "packed")
    assert len(assert_upper_bounds(PACKED, tmp_path / "packed")) > 10


def assert_upper_bounds(questions: str, *indexes: Path) -> list[list[str]]:
    """Ask in a process of its own; lines of what was asked, bytes taken, and bytes estimated."""
    done = warm.run(CODE + questions, *indexes)
    assert done.returncode == 0, done.stderr
    measured = [line.split() for line in done.stdout.splitlines()]
    above = [line for line in measured if int(line[1]) > int(line[2])]
    assert not above
    return measured
