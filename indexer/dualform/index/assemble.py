"""An index put together of pieces, whoever made them; and the work that can be shared out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from threadpoolctl import threadpool_limits

from dualform.index.equal_keys import EqualKeysWriter
from dualform.index.finish import MadeLayer, State, Summed, finish
from dualform.index.lineage import Chains, mark_of
from dualform.index.pieces import Directions, Piece, PieceStore, plan_digest
from dualform.index.plan import Plan
from dualform.store.errors import DamagedError
from dualform.store.files import (
    FileEntry,
    check_seal,
    digest,
    read_checked,
    read_json,
    write_atomic,
    write_sealed,
)
from dualform.store.index_parts import EqualKeys, layer_directory, layer_file

_REMEDY = "remove it: it is made again"


def assemble(
    directory: Path,
    plan: Plan,
    spaces: Sequence[Sequence[Piece]],
    directions: Directions,
    summed: Mapping[str, Callable[[], Summed]],
) -> None:
    """Write what is missing of an index whose pieces lie below a directory.

    Args:
        directory: The index's.
        plan: What is built.
        spaces: The pieces of each row space.
        directions: Of each layer's sketches.
        summed: Of each layer whose rows are added up, what gives that.
    """
    made = {}
    for name in plan.layers:
        pieces = spaces[plan.space_of[name]]
        made[name] = MadeLayer(
            [piece.layers[name] for piece in pieces],
            directions[name],
            _equal_keys(directory, plan, name, pieces),
            summed.get(name),
        )
    finish(directory, plan, [[piece.sidecar for piece in each] for each in spaces], made)


def sum_layer(store: PieceStore, plan: Plan, name: str, chains: Chains) -> None:
    """Add up a layer's rows, and keep what they add up to beside the pieces."""
    row_sum = plan.row_sum(name, plan.source.initial())
    with threadpool_limits(1, user_api="blas"):
        plan.add_up(name, row_sum, 0, plan.spaces[plan.space_of[name]].rows)
        summed = Summed.of(row_sum)
    tensors = {
        json.dumps([number, parameter]): np.ascontiguousarray(array)
        for number, state in enumerate([summed.total or {}, *summed.parts])
        for parameter, array in state.items()
    }
    path = _sum_path(store, name)
    entry = write_atomic(path.with_suffix(".safetensors"), save(tensors))
    write_sealed(
        path,
        {
            "of": _of_sum(plan, name),
            "made_at": mark_of(chains),
            "finite": summed.total is not None,
            "parts": len(summed.parts),
            "sums": entry.to_json(),
        },
    )


def kept_sum(store: PieceStore, plan: Plan, name: str, chains: Chains) -> Summed | None:
    """What a layer's rows add up to, if that is kept."""
    path = _sum_path(store, name)
    try:
        note: Any = read_json(path, _REMEDY)
        check_seal(path, note, _REMEDY)
        if (note["of"], note["made_at"]) != (_of_sum(plan, name), mark_of(chains)):
            return None
        data = read_checked(path.parent, FileEntry.from_json(note["sums"]), _REMEDY)
    except DamagedError:
        return None
    states: list[dict[str, np.ndarray]] = [{} for _ in range(1 + note["parts"])]
    for key, array in load(data).items():
        number, parameter = json.loads(key)
        states[number][parameter] = array
    total: State | None = states[0] if note["finite"] else None
    return Summed(total, states[1:])


def _equal_keys(
    directory: Path, plan: Plan, name: str, pieces: Sequence[Piece]
) -> EqualKeys | None:
    rows = plan.spaces[plan.space_of[name]].rows
    writer = EqualKeysWriter(directory, layer_file(name, "equal.npy"), rows, plan.most_keys())
    for piece in pieces:
        if writer.pays:
            writer.add(piece.digests[name])
    return writer.result()


def _sum_path(store: PieceStore, name: str) -> Path:
    return store.directory / layer_directory(name) / "sums.json"


def _of_sum(plan: Plan, name: str) -> str:
    """A digest of what sums depend on beside the recording."""
    groups = [
        (each.column, each.values.to_pylist()) for each in plan.parts.spaces[plan.space_of[name]]
    ]
    spec = plan.layers[name].spec
    return digest(f"{plan_digest(plan)} {spec!r} {groups!r}".encode())
