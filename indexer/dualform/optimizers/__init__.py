"""Optimizer families: how each reads a step, and how the parts of a weight move under it."""

from dualform.optimizers.adadelta import Adadelta, AdadeltaSettings
from dualform.optimizers.adafactor import Adafactor, AdafactorSettings
from dualform.optimizers.adagrad import Adagrad, AdagradSettings
from dualform.optimizers.adam import Adam, AdamSettings
from dualform.optimizers.adamax import Adamax, AdamaxSettings
from dualform.optimizers.family import STILL, Factor, Family, Transition, moved
from dualform.optimizers.lamb import Lamb, LambSettings
from dualform.optimizers.layer_run import (
    PRODUCT_ROWS,
    Affine,
    LayerRun,
    followed_bytes,
    layer_state,
    products,
)
from dualform.optimizers.lion import Lion, LionSettings
from dualform.optimizers.nadam import NAdam, NAdamSettings
from dualform.optimizers.radam import RAdam, RAdamSettings
from dualform.optimizers.registry import FAMILIES, Found, family_of
from dualform.optimizers.rmsprop import RMSprop, RMSpropSettings
from dualform.optimizers.rprop import Rprop, RpropSettings
from dualform.optimizers.sgd import SGD, SGDSettings
from dualform.optimizers.trajectory import (
    Later,
    Part,
    Trajectory,
    adjoint,
    by_momentum,
    factors_before,
    gradient_factors,
)
from dualform.optimizers.unknown import Unknown, UnknownSettings

__all__ = [
    "FAMILIES",
    "PRODUCT_ROWS",
    "SGD",
    "STILL",
    "Adadelta",
    "AdadeltaSettings",
    "Adafactor",
    "AdafactorSettings",
    "Adagrad",
    "AdagradSettings",
    "Adam",
    "AdamSettings",
    "Adamax",
    "AdamaxSettings",
    "Affine",
    "Factor",
    "Family",
    "Found",
    "Lamb",
    "LambSettings",
    "Later",
    "LayerRun",
    "Lion",
    "LionSettings",
    "NAdam",
    "NAdamSettings",
    "Part",
    "RAdam",
    "RAdamSettings",
    "RMSprop",
    "RMSpropSettings",
    "Rprop",
    "RpropSettings",
    "SGDSettings",
    "Trajectory",
    "Transition",
    "Unknown",
    "UnknownSettings",
    "adjoint",
    "by_momentum",
    "factors_before",
    "family_of",
    "followed_bytes",
    "gradient_factors",
    "layer_state",
    "moved",
    "products",
]
