"""Which process of a data-parallel run a recording is of, and where the others' recordings lie."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualform.store.errors import MissingRankError, RanksError
from dualform.store.fields import Fields

_FOLDER = re.compile(r"rank-([0-9]+)")
_LOCK = re.compile(r"\.rank-[0-9]+\.lock")


class Rank(NamedTuple):
    """One of the processes that trained one model on batches of their own.

    Its rows are its own batches', its ledger's scales those of the sum over all ranks' rows.

    Attributes:
        rank: From 0.
        world: How many there were, at least 2.
    """

    rank: int
    world: int

    def to_json(self) -> dict[str, Any]:
        """As a manifest's "ranks"."""
        return self._asdict()

    @classmethod
    def read(cls, data: Fields) -> Rank | None:
        """A manifest's "ranks"; None where it has none.

        Raises:
            ValueError: A field is wrong; it says which.
        """
        if not data.has("ranks"):
            return None
        fields = data.object("ranks")
        world = fields.integer("world", 2, 2**31)
        return cls(fields.integer("rank", 0, world - 1), world)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def rank_folder(path: Path, rank: int) -> Path:
    """Where a rank records of a run whose recording is at `path`."""
    return path / f"rank-{rank}"


def holds_nothing_yet(run: Path) -> bool:
    """Whether a folder holds locks of ranks alone: their recordings are about to be there."""
    return all(_LOCK.fullmatch(entry.name) for entry in run.iterdir())


def rank_folders(path: Path) -> list[Path]:
    """The folders of ranks in a run's, by rank; empty where there are none."""
    if not path.is_dir():
        return []
    found = {int(name[1]): p for p in path.iterdir() if (name := _FOLDER.fullmatch(p.name))}
    return [found[rank] for rank in sorted(found)]


def check_ranks(ranks: Sequence[tuple[Path, Rank | None]]) -> None:
    """Whether recordings are those of all ranks of a run, each once.

    Args:
        ranks: Their paths, and what their manifests say.

    Raises:
        RanksError: They are not; the message names the rank or the folder.
    """
    seen: dict[int, Path] = {}
    worlds = {rank.world: path for path, rank in ranks if rank is not None}
    for path, rank in ranks:
        if rank is None:
            raise RanksError(
                f"{path} is the whole recording of a run in one process; an index is of one such "
                "recording, or of all ranks of one run"
            )
        if len(worlds) > 1:
            (one, there), (other, here), *_ = worlds.items()
            raise RanksError(
                f"{there} is of a run in {one} processes and {here} of one in {other}; give the "
                "folders of one run"
            )
        if rank.rank in seen:
            raise RanksError(f"{seen[rank.rank]} and {path} are both of {rank}; give each once")
        seen[rank.rank] = path
    (world,) = worlds
    missing = [rank for rank in range(world) if rank not in seen]
    if missing:
        folder = next(iter(seen.values())).parent
        names = ", ".join(str(rank_folder(folder, rank)) for rank in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise MissingRankError(
            f"the run was in {world} processes and {names}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not given: gradients were averaged over all, "
            "so the rows of all are needed; copy it beside the others, and give the folder of the "
            "run or those of all ranks"
        )
