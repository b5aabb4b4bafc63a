"""Bytes a token that a fine-tune of a network as wide as GPT-2 small takes, by what is recorded.

    python -m benchmarks fine-tune [--blocks 2] [--targets 0.2] [--steps 1] [--batch 4]
        [--tokens 20] [--only bfloat16] [--json OUT]

GPT-2 as transformers builds it: 768 wide, 50,257 ids, a tied head; of its 12 blocks so many are
trained, and what they take is scaled to 12. Examples are a prompt and an answer; so large a part of
the tokens is the answer, whose labels alone have a loss. AdamW, under bfloat16 autocast but for the
first line. A token is one of the batch, recorded or not. Blocks are their four matrices each; the
rest are the head, tied to the embedding, and the positions. Bytes a token hardly depend on how many
tokens there are; a CPU without bfloat16 takes its time over each.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualform.record import Recorder
from dualform.store.recording import Recording

BLOCKS, IGNORED = 12, -100

RUNS: Mapping[str, Mapping[str, Any]] = {
    "float32, all rows": {"dtype": torch.float32},
    "bfloat16, all rows": {},
    "bfloat16, rows of targets": {"targets": True},
    "bfloat16, rows of targets, packed": {"targets": True, "pack": True},
}


def network(blocks: int, tokens: int) -> nn.Module:
    """The same one each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(  # type: ignore[no-any-return]
        GPT2Config(n_embd=768, n_layer=blocks, n_head=12, n_positions=tokens)
    )


def train(
    model: nn.Module,
    path: Path,
    labels: torch.Tensor,
    tokens: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    targets: bool = False,
    pack: bool = False,
) -> None:
    """A step for each batch of [steps, batch, tokens]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    with Recorder(model, optimizer, path, pack=pack) as recorder:
        for ids, wanted in zip(tokens, labels, strict=True):
            # A row predicts the next token.
            rows = nn.functional.pad(wanted[:, 1:] != IGNORED, (0, 1)) if targets else None
            recorder.annotate(token=ids, rows=rows)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = model(input_ids=ids, labels=wanted).loss
            loss.backward()
            optimizer.step()


def bytes_of(path: Path) -> dict[str, int]:
    """Of keys and values on disk, by what they are of; what several layers see counts once."""
    found = {"blocks": 0, "head and embedding": 0, "positions": 0}
    seen = set()
    with Recording.open(path) as recording:
        for layer in recording.manifest.layers:
            where = "positions" if layer.endswith(".wpe") else "head and embedding"
            where = "blocks" if ".h." in layer else where
            for record in recording.passes(layer):
                for span in (record.keys, record.values):
                    if span is not None and (record.segment, span.offset) not in seen:
                        seen.add((record.segment, span.offset))
                        found[where] += span.stored
    return found


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--targets", type=float, default=0.2, help="part of the tokens")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=20, help="of an example")
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    parser.add_argument("--out", type=Path, help="where to record (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    stream = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50_257, (given.steps, given.batch, given.tokens), generator=stream)
    labels = tokens.clone()
    labels[..., : given.tokens - round(given.targets * given.tokens)] = IGNORED
    found = {}
    for name, options in RUNS.items():
        if given.only not in name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="dualform-benchmark-", dir=given.out))
        try:
            train(network(given.blocks, given.tokens), folder / "run", labels, tokens, **options)
            sizes = bytes_of(folder / "run")
        finally:
            shutil.rmtree(folder)
        found[name] = each = {
            part: size / tokens.numel() * (BLOCKS / given.blocks if part == "blocks" else 1)
            for part, size in sizes.items()
        }
        parts = " | ".join(f"{size / 1e3:.1f}" for size in each.values())
        print(f"| {name} | {parts} | {sum(each.values()) / 1e3:.1f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
