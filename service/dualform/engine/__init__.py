"""Exact answers over an index: top-k, sums, dual output (docs/exactness.md)."""

from dualform.engine.index import Index
from dualform.engine.layer import Layer
from dualform.engine.results import (
    Coverage,
    DualOutput,
    Explanation,
    Sums,
    TopK,
    WeightsChunk,
)
from dualform.engine.verify import Damage, LayerReport, VerifyReport, verify_index

__all__ = [
    "Coverage",
    "Damage",
    "DualOutput",
    "Explanation",
    "Index",
    "Layer",
    "LayerReport",
    "Sums",
    "TopK",
    "VerifyReport",
    "WeightsChunk",
    "verify_index",
]
