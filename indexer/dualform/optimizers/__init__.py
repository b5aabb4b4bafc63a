"""Optimizer families: how each reads a step, and how the parts of a weight move under it."""

from dualform.optimizers.adam import Adam, AdamSettings
from dualform.optimizers.family import STILL, Factor, Family, Transition, moved
from dualform.optimizers.registry import FAMILIES, Found, family_of
from dualform.optimizers.sgd import SGD, SGDSettings
from dualform.optimizers.trajectory import Part, Trajectory, adjoint
from dualform.optimizers.unknown import Unknown, UnknownSettings

__all__ = [
    "FAMILIES",
    "SGD",
    "STILL",
    "Adam",
    "AdamSettings",
    "Factor",
    "Family",
    "Found",
    "Part",
    "SGDSettings",
    "Trajectory",
    "Transition",
    "Unknown",
    "UnknownSettings",
    "adjoint",
    "family_of",
    "moved",
]
