"""What a tiny GPT-2 knows of Aesop's fables, traced to the fables that taught it.

    python experiments/traced_fact.py --data DIR --out DIR [--fables 10] [--epochs 60] [--seed 0]

DIR/aesop/fables.txt holds the fables. A GPT-2 of two layers learns some of them by heart, a fable a
step. Of each one a place in the middle is asked about: all words before are the prompt, the next
four the completion. Every way ranks the fables; the one that the words are from should be first,
and the best span should hold them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from dualform.client import Client
from dualform.index import build_index
from dualform.record import Recorder

LR, MOMENTUM, CLIP, WIDTH, LAYERS = 0.1, 0.9, 10.0, 64, 2
SHORTEST, LONGEST, COMPLETION = 60, 180, 4


class Words:
    """A tokenizer: words and marks, known from some texts.

    Args:
        texts: What all tokens are from.
    """

    def __init__(self, texts: list[str]) -> None:
        self.words = sorted({word for text in texts for word in self._split(text)})
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; words that are not known are an error."""
        return [self._numbers[word] for word in self._split(text)]

    def decode(self, tokens: list[int]) -> str:
        """Their words, with spaces between."""
        return " ".join(self.words[token] for token in tokens)

    def _split(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+(?:\u2019[^\W_]+)?|[^\w\s]", text)


def main() -> int:
    """Train, ask, and write the table."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fables", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    titles, texts = fables(arguments.data, arguments.fables)
    tokenizer = Words(texts)
    model = trained(texts, titles, tokenizer, arguments)
    build_index(arguments.out / "recording", arguments.out / "index")
    with Client.local(arguments.out / "index") as client:
        found = asked(model, client, tokenizer, titles, texts)
    (arguments.out / "traced_fact.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(titles)} fables; the completion's tokens have {found['probability']:.2f} each")
    print("| ranked by | the right fable first | mean place | seconds a question |")
    print("|---|---:|---:|---:|")
    for name, way in found["ways"].items():
        print(f"| {name} | {way['first']:.2f} | {way['place']:.1f} | {way['seconds']:.2f} |")
    print(f"\nthe best span of {found['width']} places holds the completion: {found['spans']:.2f}")
    for line in found["example"]:
        print(line)
    return 0


def fables(data: Path, count: int) -> tuple[list[str], list[str]]:
    """Titles and texts of the first ones of middling length."""
    content = (data / "aesop" / "fables.txt").read_text(encoding="utf-8")
    parts = re.split(r"\n{3,}", content)
    titles, texts = [], []
    for title, text in itertools.pairwise(parts):
        words = len(text.split())
        if title.isupper() and "\n" not in title.strip() and SHORTEST <= words <= LONGEST:
            titles.append(title.strip().capitalize())
            texts.append(" ".join(text.split()))
    return titles[:count], texts[:count]


def trained(
    texts: list[str], titles: list[str], tokenizer: Words, arguments: argparse.Namespace
) -> GPT2LMHeadModel:
    """The model, recorded; documents are named by their titles."""
    torch.manual_seed(arguments.seed)
    tokens = [torch.tensor(tokenizer.encode(text)) for text in texts]
    config = GPT2Config(
        vocab_size=len(tokenizer.words),
        n_positions=max(map(len, tokens)),
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    with Recorder(model, optimizer, arguments.out / "recording") as recorder:
        recorder.add_examples(titles, texts)
        for _ in range(arguments.epochs):
            for number in torch.randperm(len(tokens)).tolist():
                one = tokens[number][None]
                places = torch.arange(one.shape[1])[None]
                recorder.annotate(document=titles[number], offset=places)
                logits = model(one).logits[0]
                optimizer.zero_grad()
                F.cross_entropy(logits[:-1], one[0, 1:]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
    return model.eval()


def asked(
    model: GPT2LMHeadModel, client: Client, tokenizer: Words, titles: list[str], texts: list[str]
) -> dict[str, Any]:
    """The place of the right fable, by every way of ranking, over one question for each."""
    layers = [name for name in client.index().layers if name not in ("transformer.wpe", "lm_head")]
    places: dict[str, list[int]] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    inside, likely, example = [], [], []
    encoded = [tokenizer.encode(text) for text in texts]
    for number, tokens in enumerate(encoded):
        start = len(tokens) // 2
        prompt, completion = tokens[:start], tokens[start : start + COMPLETION]

        before, after = tokenizer.decode(prompt), tokenizer.decode(completion)
        begin = time.process_time()
        found = client.attribute_text(
            model, tokenizer, before, after, k=len(titles), spans=1, layers=layers
        )
        seconds["dualform, all layers"] += time.process_time() - begin
        places.setdefault("dualform, all layers", []).append(found.documents.index(titles[number]))
        span = found.spans[found.documents.index(titles[number])]
        last = start + COMPLETION - 2  # the place that was trained to say the last token
        inside.append(bool(span) and span[0].first <= last and start - 1 <= span[0].last)
        likely.append(likelihood(model, prompt, completion))
        if number == 0:
            example = [
                f"prompt: … {tokenizer.decode(prompt[-12:])}",
                f"completion: {after} ({likely[0]:.2f} each)",
                *(
                    f"{score:+.2f} {title}: {part[0].text if part else ''}"
                    for title, score, part in list(
                        zip(found.documents, found.scores, found.spans, strict=True)
                    )[:3]
                ),
            ]
        begin = time.process_time()
        dots = gradients(model, encoded, prompt, completion)
        seconds["gradient dot in the end"] += time.process_time() - begin
        common = overlap(encoded, prompt + completion)
        for name, scores in (("gradient dot in the end", dots), ("words in common", common)):
            order = np.argsort(-np.array(scores), kind="stable")
            places.setdefault(name, []).append(int(np.flatnonzero(order == number)[0]))
    return {
        "fables": len(titles),
        "width": 8,
        "probability": float(np.mean(likely)),
        "spans": float(np.mean(inside)),
        "ways": {
            name: {
                "first": float(np.mean(np.array(found) == 0)),
                "place": float(np.mean(found) + 1),
                "seconds": seconds[name] / len(titles),
            }
            for name, found in places.items()
        },
        "example": example,
    }


def likelihood(model: GPT2LMHeadModel, prompt: list[int], completion: list[int]) -> float:
    """What each token of the completion is given after the prompt, on (geometric) average."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, -len(completion) - 1 : -1]
    found = F.cross_entropy(logits, torch.tensor(completion))
    return float(torch.exp(-found))


def gradients(
    model: GPT2LMHeadModel, documents: list[list[int]], prompt: list[int], completion: list[int]
) -> list[float]:
    """The products of the completion's gradient with each fable's, in the end."""

    def gradient(tokens: list[int], first: int) -> torch.Tensor:
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0, first - 1 : -1]
        loss = F.cross_entropy(logits, ids[0, first:], reduction="sum")
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([each.flatten() for each in found])

    asked_about = gradient(prompt + completion, len(prompt))
    return [float(gradient(tokens, 1) @ asked_about) for tokens in documents]


def overlap(documents: list[list[int]], tokens: list[int]) -> list[float]:
    """Words in common, each weighed by how few fables have it."""
    having = Counter(token for document in documents for token in set(document))
    weigh = {token: np.log(len(documents) / having[token]) for token in set(tokens)}
    return [sum(weigh[token] for token in set(tokens) & set(one)) for one in documents]


if __name__ == "__main__":
    raise SystemExit(main())
