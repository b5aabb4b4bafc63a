"""The answer to a TopKQuestion: what is ranked, by which strategy, and the rows found."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from dualform.engine.api.opened import Opened, asked_contribution, query_tensor
from dualform.engine.api.results import Coverage, TopK
from dualform.engine.devices.device import OnDeviceError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.plan.offer import Offer
from dualform.engine.plan.plan import Plan, check_strategy
from dualform.engine.topk import scan
from dualform.engine.topk.distinct import counts as distinct_counts
from dualform.engine.topk.distinct_keys import DistinctKeys, by_distinct_keys, distinct_keys_apply
from dualform.engine.topk.followed import best_by_metric
from dualform.engine.topk.followed_along import best_along
from dualform.engine.topk.on_devices import DeviceScan, devices_apply, offer
from dualform.engine.topk.ranking import Ranking
from dualform.engine.topk.top_k import Hits
from dualform.questions import TopKQuestion


def top_k(opened: Opened, layer: Layer, question: TopKQuestion, stop: Stop | None) -> TopK:
    """The best rows of one layer.

    Args:
        opened: The index.
        layer: Whose memory.
        question: What is asked.
        stop: Asked between tiles.
    """
    queries = query_tensor(layer, question.queries)
    ranking, end = _ranking(opened, layer, question)
    selected = layer.space.select(question.where, end, stop)
    whole = selected is layer.space.everything
    faiss: str | None = "this process scans with torch alone"
    if opened.use_faiss:
        faiss = scan.faiss_applies(layer, ranking, whole)
    refused = {
        "certified": scan.sketches_apply(layer, ranking),
        "device": devices_apply(opened.devices, ranking),
        "distinct_keys": distinct_keys_apply(layer, ranking),
        "flat": faiss,
        "scan": None,
    }
    coverage = Coverage.of(layer, selected)
    contribution = ranking.contribution
    if contribution is not None and contribution.coefficients is None and end is not None:
        why = "each step has its own metric, by which rows are bounded"
        check_strategy(question.strategy, {**dict.fromkeys(refused, why), "scan": None})
        plan = Plan("scan", why, {})
        rows = selected & layer.finite
        if contribution.directions is not None:
            hits = best_along(
                layer, queries, ranking, opened.metric_finder(layer, end, stop), rows, stop
            )
        else:
            metric = opened.metrics.find(layer, contribution.unit, end, stop)
            hits = best_by_metric(layer, queries, ranking, metric, rows, stop)
    else:
        hits, plan = _search(
            opened, layer, queries, ranking, refused, question.strategy, selected, stop
        )
    check_stop(stop)
    grouping, distinct = ranking.grouping, ranking.distinct
    assert not isinstance(grouping, str)
    assert not isinstance(distinct, str)
    shape = hits.ids.shape if grouping is not None else (len(queries), ranking.k)
    counts = None
    if distinct is not None:
        counts = distinct_counts(hits.positions, selected, distinct, grouping).reshape(shape)
    return TopK(
        rows=hits.ids.reshape(shape),
        scores=hits.scores.reshape(shape),
        counts=counts,
        groups=None if grouping is None else grouping.values,
        columns=layer.space.take(hits.positions.reshape(-1)),
        coverage=coverage,
        plan=plan,
    )


def _kind(ranking: Ranking) -> str:
    """What the planner remembers under one name: sketches serve such questions alike."""
    contribution = ranking.contribution
    if contribution is None:
        return f"{ranking.order} cosine" if ranking.cosine else ranking.order
    along = contribution.unit if contribution.directions is None else "direction"
    return f"{ranking.order} {along}"


def _search(
    opened: Opened,
    layer: Layer,
    queries: torch.Tensor,
    ranking: Ranking,
    refused: dict[str, str | None],
    strategy: str,
    selected: np.ndarray,
    stop: Stop | None,
) -> tuple[Hits, Plan]:
    """The best of the selected rows, bool [total], by the strategy asked for or the cheapest."""
    whole = selected is layer.space.everything
    rows = layer.rows if whole else int(np.count_nonzero(selected))
    ranked = selected if layer.nonfinite == 0 else selected & layer.finite
    by_keys = None if refused["distinct_keys"] else by_distinct_keys(layer, ranking, rows, whole)
    offered, refused = _offered(opened, layer, queries, ranking, ranked, refused)
    about = (layer, _kind(ranking), ranking.hits, len(queries))
    plan = opened.planner.top_k(*about, rows, refused, strategy, by_keys, offered)
    opened.devices.note(layer, plan.without("device"))
    search: scan.Scan | DistinctKeys | DeviceScan
    faiss = refused["flat"] is None
    if plan.strategy == "distinct_keys":
        assert by_keys is not None
        way = "scan" if refused["certified"] else "certified"
        search = DistinctKeys(layer, queries, ranking, way, stop)
        about = (layer, _kind(ranking), by_keys.hits, len(queries))
    elif plan.strategy == "device":
        assert offered is not None
        way, stream = opened.planner.rest(*about, offered, refused)
        search = DeviceScan(opened.devices, layer, queries, ranking, way, faiss, stream, stop)
    else:
        search = scan.Scan(layer, queries, ranking, plan.strategy, faiss, stop)
    begin = time.perf_counter()
    try:
        hits = search.run(ranked)
    except OnDeviceError as error:
        if strategy == "device":
            raise error.refusal from None
        refused = {**refused, "device": str(error)}
        return _search(opened, layer, queries, ranking, refused, strategy, selected, stop)
    opened.planner.learn(*about, plan, search.kept_share, time.perf_counter() - begin)
    if isinstance(search, DistinctKeys) and strategy == "auto":
        reason = f"{search.keys:,} distinct keys stand for {rows:,} rows"
        plan = replace(plan, reason=reason)
    return hits, plan


def _offered(
    opened: Opened,
    layer: Layer,
    queries: torch.Tensor,
    ranking: Ranking,
    ranked: np.ndarray,
    refused: dict[str, str | None],
) -> tuple[Offer | None, dict[str, str | None]]:
    """What devices would do, and why each strategy does not apply, with that known."""
    if refused["device"] is not None:
        return None, refused
    found = offer(opened.devices, layer, queries, ranking, ranked)
    if found is not None:
        return found, refused
    return None, {**refused, "device": "no row of the layer lies on a device"}


def _ranking(opened: Opened, layer: Layer, question: TopKQuestion) -> tuple[Ranking, int | None]:
    """What is ranked, and the step before which rows take part."""
    contribution, end = None, None
    if question.rank_by == "contribution":
        contribution, end = asked_contribution(opened, layer, question)
    grouping = distinct = None
    if question.group_by is not None:
        grouping = layer.space.grouping(question.group_by)
    if question.distinct is not None:
        distinct = layer.space.grouping(question.distinct, "distinct")
    cosine = question.rank_by == "cosine"
    return Ranking(question.k, question.order, grouping, contribution, distinct, cosine), end
