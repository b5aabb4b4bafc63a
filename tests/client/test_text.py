"""A completion traced to documents and the places in them: against `scores`, whose numbers are
proved elsewhere, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, InvalidArgumentError
from dualform.client._spans import best_spans
from dualform.client._tokens import check_taken, encoded, not_taken
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
                places = torch.arange(tokens.shape[1])[None]
                far = places * 10**11  # as if it were a corpus, and tokens few
                recorder.annotate(document=name, offset=places, far=far, share=places / 99)
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
        trained.model, Letters(), "the ", "crow", where="document != 'crow'", spans=0, k=np.int8(4)
    )
    assert set(found.documents) == set(DOCUMENTS) - {"crow"}
    assert found.spans == [[], [], []]
    early = client.attribute_text(
        trained.model, Letters(), "the ", "crow", where="step < 40", k=1, order="absolute"
    )
    assert early.scores.shape == (1,)
    assert early.spans[0]


def test_places_far_apart(trained: Trained, client: Client) -> None:
    found = client.attribute_text(
        trained.model,
        Letters(),
        "a fox has a ",
        "den",
        position="far",
        k=1,
        spans=np.int8(2),
        width=np.int8(4),
    )
    assert len(found.spans[0]) == 2
    assert all(span.text is not None and span.score > 0 for span in found.spans[0])


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"completion": ""}, "completion", "no tokens"),
    ({"completion": 3}, "completion", "no text"),
    ({"target": "loss"}, "target", "none of"),
    ({"tokenizer": str}, "tokenizer", "has no decode"),
    ({"spans": -1}, "spans", "0 or more"),
    ({"width": 0}, "width", "1 or more"),
    ({"by": "lable"}, "by", "unknown column"),
    ({"position": "lable"}, "position", "unknown column"),
    ({"position": "document"}, "position", "a column of str"),
    ({"position": "share"}, "position", "a column of float64"),
    ({"tokenizer": Letters}, "tokenizer", "class Letters"),
    ({"model": nn.Linear(3, 2)}, "model", "none of the index's layers"),
]


@pytest.mark.parametrize("which", range(len(BAD)))
def test_bad_input(trained: Trained, client: Client, which: int) -> None:
    change, field, says = BAD[which]
    asked = {"model": trained.model, "tokenizer": Letters(), "prompt": "a ", "completion": "fox"}
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        client.attribute_text(**{**asked, **change})
    assert caught.value.field == field


class Gives(Letters):
    """Encodes everything as what it is told to, and decodes as well."""

    def __init__(self, tokens: Any, text: Any = "a") -> None:
        self.tokens, self.text = tokens, text

    def encode(self, text: str) -> Any:
        if isinstance(self.tokens, Exception):
            raise self.tokens
        return self.tokens

    def decode(self, tokens: list[int]) -> Any:
        return self.text


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (None, "NoneType"),
        ({"input_ids": [1]}, "dict"),
        ([[1, 2]], "no integer"),
        (torch.tensor([[1, 2]]), "no integer"),
        (torch.tensor(1), "as int"),
        (["a"], "no integer"),
        ([1.7], "no integer"),
        ([True], "no integer"),
        ([1 << 70], "which no model has"),
        ([-1], "which no model has"),
        (ValueError("not in it"), "not in it"),
        ([10_000], "beyond its vocabulary"),
    ],
    ids=str,
)
def test_tokenizers_of_another_kind(
    trained: Trained, client: Client, tokens: Any, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        client.attribute_text(trained.model, Gives(tokens), "a ", "fox")
    assert caught.value.field == "tokenizer"


def test_a_tokenizer_that_gives_no_text(trained: Trained, client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="to NoneType") as caught:
        client.attribute_text(trained.model, Gives([1, 2], None), "a ", "fox")
    assert caught.value.field == "tokenizer"


@pytest.mark.parametrize(
    "tokens",
    [(3, 4), torch.tensor([3, 4]), np.array([3, 4]), [np.int32(3), torch.tensor(4)],
     SimpleNamespace(ids=[3, 4])],
    ids=["tuple", "tensor", "array", "scalars", "encoding"],
)  # fmt: skip
def test_other_lists_of_integers(tokens: Any) -> None:
    assert encoded(Gives(tokens), "any") == [3, 4]


class Placed(nn.Module):
    """As GPT-2 is: a table of tokens, one of places, and a config that says how many."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_positions=6)
        self.tokens, self.places = nn.Embedding(9, 2), nn.Embedding(positions, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def test_what_a_model_has_no_rows_for() -> None:
    for places in (6, 8):
        check_taken(Placed(places), [0, 8, 1, 1, 1, 1])
        with pytest.raises(InvalidArgumentError, match="context is 6") as caught:
            check_taken(Placed(places), [1] * 7)
        assert caught.value.field == "prompt"
    with pytest.raises(InvalidArgumentError, match="vocabulary of 9") as caught:
        check_taken(Placed(6), [0, 9])
    assert caught.value.field == "tokenizer"
    check_taken(Placed(50), [1] * 7)  # its places are looked up in no table of so many
    assert "config says 6" in str(not_taken(Placed(50), [1] * 7, IndexError("out of range")))


def dense(
    places: list[tuple[int, float]], count: int, width: int, order: str
) -> list[tuple[int, int, float]]:
    """The same, by every place from the first to the last."""
    low, high = min(places)[0], max(places)[0]
    scores = np.zeros(high - low + 1)
    for place, score in places:
        scores[place - low] = score
    width = min(width, len(scores))
    sums = np.convolve(scores, np.ones(width), "valid")
    merits = {"largest": sums, "smallest": -sums, "absolute": np.abs(sums)}[order].copy()
    found: list[tuple[int, int, float]] = []
    while len(found) < count and merits.max() > 0:
        first = int(merits.argmax())
        found.append((low + first, low + first + width - 1, float(sums[first])))
        merits[max(0, first - width + 1) : first + width] = -np.inf
    return found


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_best_runs_are_those_of_all_places(order: str) -> None:
    drawn = np.random.default_rng(0)
    for _ in range(100):
        where = drawn.choice(40, drawn.integers(1, 15), replace=False) - 5
        # Whole numbers, so that sums are exact in any order.
        places = [(int(place), float(drawn.integers(-4, 5))) for place in where]
        count, width = int(drawn.integers(1, 6)), int(drawn.integers(1, 12))
        assert best_spans(places, count, width, order) == dense(places, count, width, order)


def test_the_best_runs_of_places_far_apart() -> None:
    places = [(10**12, 2.0), (-(2**63), 1.0), (2**63 - 1, 3.0)]
    assert best_spans(places, 2, 2, "largest") == [
        (2**63 - 2, 2**63 - 1, 3.0),
        (10**12 - 1, 10**12, 2.0),
    ]


def test_the_best_runs() -> None:
    places = [(10, 1.0), (11, -2.0), (13, 4.0), (14, 1.0), (18, 3.0)]
    assert best_spans(places, 3, 2, "largest") == [(13, 14, 5.0), (17, 18, 3.0), (10, 11, -1.0)][:2]
    assert best_spans(places, 9, 2, "smallest") == [(11, 12, -2.0)]
    assert best_spans(places, 1, 99, "largest") == [(10, 18, 7.0)]
    assert best_spans([], 3, 2, "largest") == []
