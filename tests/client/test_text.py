"""A completion traced to documents and the places in them: against `scores`, whose numbers are
proved elsewhere, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, InvalidArgumentError
from dualform.client._text import best_spans
from dualform.index import build_index
from dualform.record import Recorder

DOCUMENTS = {
    "crow": "the crow has a cheese",
    "fox": "a fox has a den",
    "sun": "the sun is far",
    "crow's": "the crow is black",
}


class Letters:
    """A tokenizer: letters."""

    def __init__(self) -> None:
        self.known = sorted(set("".join(DOCUMENTS.values())))

    def encode(self, text: str) -> list[int]:
        return [self.known.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.known[token] for token in tokens)


class Special(Letters):
    """As transformers' are: with a first token, unless it is not wanted."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + super().encode(text)


class Speaker(nn.Module):
    """A language model that sees all letters before, each less than the next."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 12)
        self.hidden = nn.Linear(12, 16)
        self.out = nn.Linear(16, letters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        back = (places[:, None] - places[None]).clamp(min=0)
        seen = torch.where(places[:, None] >= places[None], 0.6**back, 0.0)
        return self.out(torch.tanh(self.hidden(seen @ self.table(tokens))))


@dataclass(frozen=True)
class Trained:
    path: Path
    model: Speaker


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("text")
    torch.manual_seed(0)
    tokenizer = Letters()
    model = Speaker(len(tokenizer.known))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with Recorder(model, optimizer, path / "recording") as recorder:
        recorder.add_examples(list(DOCUMENTS), list(DOCUMENTS.values()))
        for _ in range(40):
            for name, text in DOCUMENTS.items():
                tokens = torch.tensor([tokenizer.encode(text)])
                recorder.annotate(document=name, offset=torch.arange(tokens.shape[1])[None])
                logits = model(tokens)[0, :-1]
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
                optimizer.step()
    build_index(path / "recording", path / "index")
    return Trained(path / "index", model.eval())


@pytest.fixture(scope="module")
def client(trained: Trained) -> Iterator[Client]:
    with Client.local(trained.path) as opened:
        yield opened


@pytest.mark.parametrize("target", ["margin", "logprob"])
@pytest.mark.parametrize("tokenizer", [Letters(), Special()], ids=["letters", "special"])
def test_documents_and_spans(
    trained: Trained, client: Client, target: str, tokenizer: Letters
) -> None:
    prompt, completion = "a fox has a ", "den"
    found = client.attribute_text(
        trained.model, tokenizer, prompt, completion, target=target, k=3, spans=2, width=4
    )
    ids = Letters().encode(prompt + completion)
    places = range(len(prompt) - 1, len(ids) - 1)

    def number(logits: torch.Tensor) -> torch.Tensor:
        parts = []
        for place in places:
            one, token = logits[0, place], ids[place + 1]
            others = torch.cat([one[:token], one[token + 1 :]]) if target == "margin" else one
            parts.append(one[token] - others.logsumexp(0))
        return torch.stack(parts).sum()[None]

    whole = client.scores(trained.model, torch.tensor([ids]), target=number, by="document")
    assert whole.values is not None
    order = np.argsort(-whole.values[0])[:3]
    assert found.documents == [whole.groups[place] for place in order]
    np.testing.assert_allclose(found.scores, whole.values[0][order], rtol=1e-5)
    np.testing.assert_allclose(found.target, whole.targets[0], rtol=1e-5)
    assert found.tokens == list("den")
    assert found.documents[0] == "fox"
    for document, spans in zip(found.documents, found.spans, strict=True):
        quoted = document.replace("'", "''")
        inside = client.scores(
            trained.model, torch.tensor([ids]), target=number, by="offset",
            where=f"document = '{quoted}'",
        )  # fmt: skip
        assert inside.values is not None
        sums = np.convolve(inside.values[0], np.ones(4), "valid")
        first = int(sums.argmax())
        assert (spans[0].first, spans[0].last) == (first, first + 3)
        np.testing.assert_allclose(spans[0].score, sums[first], rtol=1e-5)
        text = DOCUMENTS[document]
        assert [span.text for span in spans] == [text[span.first : span.last + 2] for span in spans]
        assert all(span.score > 0 for span in spans)
    if target == "margin":  # the end of the fox's line is where the den was learned
        assert found.spans[0][0].text is not None
        assert "de" in found.spans[0][0].text


def test_with_a_filter_and_without_spans(trained: Trained, client: Client) -> None:
    found = client.attribute_text(
        trained.model, Letters(), "the ", "crow", where="document != 'crow'", spans=0, k=4
    )
    assert set(found.documents) == set(DOCUMENTS) - {"crow"}
    assert found.spans == [[], [], []]
    early = client.attribute_text(
        trained.model, Letters(), "the ", "crow", where="step < 40", k=1, order="absolute"
    )
    assert early.scores.shape == (1,)
    assert early.spans[0]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"completion": ""}, "completion", "no tokens"),
    ({"completion": 3}, "completion", "no text"),
    ({"target": "loss"}, "target", "none of"),
    ({"tokenizer": str}, "tokenizer", "has no decode"),
    ({"spans": -1}, "spans", "0 or more"),
    ({"width": 0}, "width", "1 or more"),
    ({"by": "lable"}, "by", "unknown column"),
    ({"position": "lable"}, "by", "unknown column"),
    ({"model": nn.Linear(3, 2)}, "model", "none of the index's layers"),
]


@pytest.mark.parametrize("which", range(len(BAD)))
def test_bad_input(trained: Trained, client: Client, which: int) -> None:
    change, field, says = BAD[which]
    asked = {"model": trained.model, "tokenizer": Letters(), "prompt": "a ", "completion": "fox"}
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        client.attribute_text(**{**asked, **change})
    assert caught.value.field == field


def test_the_best_runs() -> None:
    places = [(10, 1.0), (11, -2.0), (13, 4.0), (14, 1.0), (18, 3.0)]
    assert best_spans(places, 3, 2, "largest") == [(13, 14, 5.0), (17, 18, 3.0), (10, 11, -1.0)][:2]
    assert best_spans(places, 9, 2, "smallest") == [(11, 12, -2.0)]
    assert best_spans(places, 1, 99, "largest") == [(10, 18, 7.0)]
    assert best_spans([], 3, 2, "largest") == []
