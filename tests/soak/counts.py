"""How many: a few hundred of each in `make test`, very many in `make soak`.

DUALFORM_SOAK is a share of the full counts: 1 in `make soak`, 0.1 for a tenth. DUALFORM_SEED, 0 by
default, chooses what the model does and what the inputs are: the same number, the same ones.
"""

from __future__ import annotations

import os

SHARE = float(os.environ.get("DUALFORM_SOAK") or 0)
SEED = int(os.environ.get("DUALFORM_SEED") or 0)


def count(few: int, many: int) -> int:
    """`few`, or in a soak its share of `many`."""
    return max(few, round(SHARE * many)) if SHARE else few


def seeds(wanted: int) -> range:
    """Of so many inputs."""
    return range(SEED * 10**7, SEED * 10**7 + wanted)


def tell(words: str) -> None:
    """A figure, on a line of its own where pytest shows output (-s)."""
    print(f"\nsoak: {words}", flush=True)
