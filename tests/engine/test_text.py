"""Text columns, which are dictionaries in memory, also beyond Arrow's usual 2 GiB of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from synthetic import make_index

from dualform.client import Client
from dualform.engine import Index
from dualform.engine.rows import rows as own

KEYS = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
NOTES = [f"note {t % 90:03}" if t % 7 else "ü" * 50 for t in range(300)]


@pytest.mark.parametrize("most", [own.MOST_TEXT, 100])
def test_text_is_found_grouped_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With 100 for 2 GiB, the text of this small index is what takes wider offsets."""
    monkeypatch.setattr(own, "MOST_TEXT", most)
    path = make_index(tmp_path, KEYS, KEYS[:, :2], shard_rows=70, note=NOTES)
    with Index.open(path, device="cpu") as index:
        kind = pa.large_string() if most == 100 else pa.string()
        assert index.layers["fc"].space.columns["note"].type.value_type == kind
    with Client.local(path) as client:
        assert dict(client.index().layers["fc"].columns)["note"] == "str"
        hits = client.top_k("fc", KEYS[:2], k=300)
        for rows, notes in zip(hits.rows, hits["note"], strict=True):
            assert list(notes) == [NOTES[row] for row in rows]
        wanted = [t for t, note in enumerate(NOTES) if "note 003" <= note < "note 020"]
        found = client.top_k(
            "fc", KEYS[:1], k=300, where="note >= 'note 003' and note < 'note 020'"
        )
        assert sorted(row for row in found.rows[0] if row >= 0) == wanted
        sums = client.sums("fc", KEYS[:1], group_by="note")
        assert sums.groups == sorted(set(NOTES))
        scores = KEYS.astype(np.float64) @ KEYS[0].astype(np.float64)
        of_note = [sum(scores[t] for t in range(300) if NOTES[t] == note) for note in sums.groups]
        np.testing.assert_allclose(sums.values[0], of_note, rtol=1e-5, atol=1e-5)
