"""Exact answers over an index: top-k, top groups, sums, dual output (docs/exactness.md)."""

from dualform.engine.api.index import Index
from dualform.engine.api.results import (
    Coverage,
    DualOutput,
    Explanation,
    Sums,
    TopGroups,
    TopK,
    WeightsChunk,
)
from dualform.engine.api.verify import (
    Damage,
    LayerReport,
    VerifyReport,
    unexplained_share,
    verify_index,
)
from dualform.engine.memory.layer import Layer

__all__ = [
    "Coverage",
    "Damage",
    "DualOutput",
    "Explanation",
    "Index",
    "Layer",
    "LayerReport",
    "Sums",
    "TopGroups",
    "TopK",
    "VerifyReport",
    "WeightsChunk",
    "unexplained_share",
    "verify_index",
]
