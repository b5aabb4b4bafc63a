"""Patches cut from inputs, against torch's own windows of a padded tensor; geometry that lies."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.store.fields import Fields
from dualform.store.patches import Patches

PLAIN = Patches(4, (9,), (3,), (1,), (1,), ((1, 1),), "zeros", 1)
GEOMETRIES = [
    PLAIN,
    PLAIN._replace(stride=(2,), dilation=(3,), padding=((4, 1),), groups=2),
    PLAIN._replace(kernel=(1,), padding=((0, 0),)),
    *(
        Patches(6, (7, 5), (3, 2), (2, 1), (1, 2), ((1, 2), (2, 0)), mode, 3)
        for mode in ("zeros", "reflect", "replicate", "circular")
    ),
    Patches(2, (4, 5, 3), (2, 3, 1), (1, 2, 1), (2, 1, 1), ((1, 0), (1, 1), (0, 2)), "zeros", 2),
    Patches(2, (4, 5, 3), (2, 2, 2), (2, 1, 1), (1, 1, 1), ((1, 1),) * 3, "circular", 1),
]


def windows(patches: Patches, inputs: torch.Tensor) -> torch.Tensor:
    """The keys of [n, channels, *size], place by place."""
    flat = [pad for both in reversed(patches.padding) for pad in both]
    mode = "constant" if patches.mode == "zeros" else patches.mode
    padded = nn.functional.pad(inputs, flat, mode)
    axes = range(len(patches.size))
    starts = [
        range(0, padded.shape[a + 2] - patches.dilation[a] * (patches.kernel[a] - 1), stride)
        for a, stride in enumerate(patches.stride)
    ]
    rows = []
    for one in padded:
        for group in one.chunk(patches.groups):
            for place in itertools.product(*starts):
                seen = group
                for a in axes:
                    step = patches.dilation[a]
                    which = torch.arange(place[a], place[a] + step * patches.kernel[a], step)
                    seen = seen.index_select(a + 1, which)
                rows.append(seen.flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("patches", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_rows_are_the_windows(patches: Patches, dtype: Any) -> None:
    inputs = torch.arange(1, 1 + 3 * patches.numbers).reshape(3, patches.channels, *patches.size)
    expected = windows(patches, inputs.double()).numpy().astype(dtype)
    given = inputs.reshape(3, -1).numpy().astype(dtype)
    assert expected.shape == (3 * patches.rows, patches.d_in)
    assert np.array_equal(patches.cut(given), expected)
    for start, stop in itertools.combinations(range(0, len(expected) + 1, 7), 2):
        part = slice(start, stop)
        assert np.array_equal(patches.cut(given, part), expected[part])
    assert len(patches.cut(given, slice(5, 5))) == 0


def test_cut_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and places that do not go into memory at once."""
    patches = GEOMETRIES[3]
    given = np.random.default_rng(0).random((5, patches.numbers), np.float32)
    whole, part = patches.cut(given), slice(11, 4 * patches.rows + 3)
    monkeypatch.setattr("dualform.store.patches._INDEX_BYTES", 5 * 8 * patches.d_in)
    monkeypatch.setattr("dualform.store.patches._PADDED_BYTES", 2 * 4 * 6 * 10 * 7)
    assert np.array_equal(patches.cut(given), whole)
    assert np.array_equal(patches.cut(given, part), whole[part])


def test_it_pays_where_the_input_is_smaller() -> None:
    found = [patches.pays for patches in GEOMETRIES]
    sizes = [patches.numbers < patches.rows * patches.d_in for patches in GEOMETRIES]
    assert found == sizes
    assert not GEOMETRIES[2].pays  # 1 by 1
    assert not PLAIN._replace(stride=(3,)).pays  # nothing comes twice
    # Padding that makes much of little is not cut when reading.
    assert not PLAIN._replace(size=(1,), kernel=(2,), padding=((500, 500),)).pays


@pytest.mark.parametrize("patches", GEOMETRIES, ids=str)
def test_there_and_back(patches: Patches) -> None:
    data = json.loads(json.dumps(patches.to_json()))
    assert Patches.read(Fields(data, "patches[0]")) == patches


LIES: dict[str, tuple[str, Any]] = {
    "no size": ("size", []),
    "four axes": ("size", [2, 2, 2, 2]),
    "an axis less": ("kernel", []),
    "a kernel of nothing": ("kernel", [0]),
    "larger than the input": ("kernel", [2**31]),
    "a step of nothing": ("stride", [0]),
    "no pairs": ("padding", [1]),
    "padded to terabytes": ("padding", [[2**31, 2**31]]),
    "padded by less than nothing": ("padding", [[-1, 1]]),
    "an unknown mode": ("mode", "mirror"),
    "groups that do not divide": ("groups", 3),
    "more groups than channels": ("groups", 8),
    "no channels": ("channels", 0),
    "half a channel": ("channels", 4.5),
    "beyond any count": ("channels", 2**60),
}


@pytest.mark.parametrize("lie", LIES)
def test_geometry_that_lies(lie: str) -> None:
    field, value = LIES[lie]
    data = json.loads(json.dumps({**PLAIN.to_json(), field: value}))
    with pytest.raises(ValueError, match=rf"patches\[0\]\.{field}"):
        Patches.read(Fields(data, "patches[0]"))
    del data[field]
    with pytest.raises(ValueError, match=rf"patches\[0\]\.{field} is missing"):
        Patches.read(Fields(data, "patches[0]"))
