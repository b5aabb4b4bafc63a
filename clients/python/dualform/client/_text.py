"""Text in, text out: which documents, and which spans of them, made a language model say this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import value_of
from dualform.client._asking import Asking, Steps
from dualform.client._attributing import Attributing
from dualform.client._attribution import AttributionResult, attribution_of, join_attributions
from dualform.client._retry import Deadline
from dualform.client._scores import Collector
from dualform.client._targets import logits_of
from dualform.client.errors import InvalidArgumentError
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    import torch

    from dualform.client._gradients import Gradients

TEXT_TARGETS = ("logprob", "margin")


class Tokenizer(Protocol):
    """What is needed of a tokenizer: Hugging Face's have it."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""


@dataclass(frozen=True)
class Span:
    """Neighbouring places of a document.

    Attributes:
        first, last: The places, both inside, as the column of positions counts them.
        score: What the rows there added to the target.
        text: Of the document's payload the tokens there, and the one after them, which the last
            place was trained to say; None where there is no payload.
    """

    first: int
    last: int
    score: float
    text: str | None


@dataclass(frozen=True, eq=False)
class TextAttribution:
    """The documents behind a completion.

    Attributes:
        documents: [k], those that did most.
        scores: float64 [k], by how much.
        spans: For each document where in it, the most first.
        tokens: The completion, token by token.
        target: The completion's log probability, or margin, after the prompt.
        found: The answer about documents, of one input.
    """

    documents: list[Any]
    scores: npt.NDArray[np.float64]
    spans: list[list[Span]]
    tokens: list[str]
    target: float
    found: AttributionResult


@dataclass(frozen=True)
class TextQuestion:
    """A question about a completion.

    Attributes:
        model, layers, check_model: As for `Attributing`.
        tokenizer: Makes tokens of text.
        prompt, completion: The text.
        target: "logprob" or "margin".
        position: The column of places in a document.
        spans, width: So many of each document, each of so many places.
        asked: What is asked of the index, but for layers and inputs.
        where: What the user gave as filter.
    """

    model: Any
    tokenizer: Tokenizer
    prompt: str
    completion: str
    target: str
    position: str
    spans: int
    width: int
    layers: str | Sequence[str] | None
    check_model: bool
    asked: Mapping[str, Any]
    where: str | pb.Filter | None

    def attribute(self, asking: Asking, timeout: float | None) -> Steps[TextAttribution]:
        """See Client.attribute_text."""
        self._check()
        import torch

        prompt = self._tokens(self.prompt, "prompt")
        completion = self._tokens(self.completion, "completion")
        deadline = asking.deadline(timeout)
        question = Attributing(
            model=self.model,
            inputs=torch.tensor([prompt + completion], device=_device(self.model)),
            target=_target_of(self.target, completion),
            labels=None,
            token=None,
            together=False,
            layers=self.layers,
            check_model=self.check_model,
            asked=self.asked,
            where=self.where,
        )
        gradients = yield from question.run(asking, deadline)
        parts: list[AttributionResult] = []
        yield from question.ask(
            asking, deadline, gradients, lambda *part: parts.append(attribution_of(*part))
        )
        found = join_attributions(parts)
        documents = [
            document
            for document, count in zip(found.groups[0].tolist(), found.counts[0], strict=True)
            if count
        ]
        payloads = yield from asking.examples(
            _ids(documents), self.asked["index"], deadline.remaining()
        )
        spans = []
        for document, payload in zip(documents, payloads, strict=True):
            spans.append(
                (yield from self._spans(asking, deadline, question, gradients, document, payload))
            )
        return TextAttribution(
            documents=documents,
            scores=found.scores[0][: len(documents)],
            spans=spans,
            tokens=[self.tokenizer.decode([token]) for token in completion],
            target=float(found.targets[0]),
            found=found,
        )

    def _check(self) -> None:
        if self.target not in TEXT_TARGETS:
            raise InvalidArgumentError(
                f"target={self.target!r} is none of 'logprob', 'margin'", field="target"
            )
        for name in ("encode", "decode"):
            if not callable(getattr(self.tokenizer, name, None)):
                raise InvalidArgumentError(
                    f"tokenizer is of type {type(self.tokenizer).__name__} and has no {name}(); "
                    "one with encode(text) and decode(tokens) is needed, as transformers' are",
                    field="tokenizer",
                )
        for name, least in (("spans", 0), ("width", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(
                    f"{name} is {value!r}; an integer, {least} or more, is needed", field=name
                )

    def _tokens(self, text: str, field: str) -> list[int]:
        if not isinstance(text, str):
            raise InvalidArgumentError(f"{field}={text!r} is no text", field=field)
        tokens = encoded(self.tokenizer, text)
        if not tokens:
            raise InvalidArgumentError(
                f"{field}={text!r} has no tokens; at least one is needed", field=field
            )
        return tokens

    def _spans(
        self,
        asking: Asking,
        deadline: Deadline,
        question: Attributing,
        gradients: Gradients,
        document: Any,
        payload: bytes | str | None,
    ) -> Steps[list[Span]]:
        """Where in one document."""
        if not self.spans:
            return []
        inside = pb.Filter(
            comparison=pb.Comparison(
                column=self.asked["by"], operator=pb.OPERATOR_EQ, values=[value_of(document, "by")]
            )
        )
        if document is None:
            inside.comparison.operator = pb.OPERATOR_IS_NULL
            del inside.comparison.values[:]
        where = self.asked["where"]
        if where is not None:
            inside = pb.Filter(all_of=pb.FilterList(filters=[where, inside]))
        order = self.asked["order"]
        asked = {**self.asked, "by": self.position, "k": None, "where": inside}
        collector = Collector(None, 1)
        yield from replace(question, asked=asked, where=inside).ask(
            asking, deadline, gradients, collector.take
        )
        found = collector.result()
        assert found.values is not None
        tokens = encoded(self.tokenizer, payload) if isinstance(payload, str) else None
        places = [(place, s) for place, s in zip(found.groups, found.values[0], strict=True)
                  if place is not None]  # fmt: skip
        return [
            Span(first, last, score, self._text(tokens, first, last))
            for first, last, score in best_spans(places, self.spans, self.width, order)
        ]

    def _text(self, tokens: list[int] | None, first: int, last: int) -> str | None:
        return None if tokens is None else self.tokenizer.decode(tokens[first : last + 2])


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens, without those that mark its beginning and end."""
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[call-arg]
    except TypeError:
        tokens = tokenizer.encode(text)
    return [int(token) for token in tokens]


def best_spans(
    places: Sequence[tuple[int, float]], count: int, width: int, order: str
) -> list[tuple[int, int, float]]:
    """Of all runs of so many neighbouring places those with the best sums, none overlapping.

    Args:
        places: Each place with its score; those that are not there have none.
        count: At most so many.
        width: Places of a run; fewer where all are.
        order: "largest", "smallest" or "absolute".

    Returns:
        First and last place, and the sum.
    """
    if not places:
        return []
    low, high = min(place for place, _ in places), max(place for place, _ in places)
    scores = np.zeros(high - low + 1)
    for place, score in places:
        scores[place - low] += score
    width = min(width, len(scores))
    sums = np.convolve(scores, np.ones(width), "valid")
    merits = {"largest": sums, "smallest": -sums, "absolute": np.abs(sums)}[order].copy()
    found: list[tuple[int, int, float]] = []
    while len(found) < count and merits.max() > (-np.inf if order == "absolute" else 0):
        first = int(merits.argmax())
        found.append((low + first, low + first + width - 1, float(sums[first])))
        merits[max(0, first - width + 1) : first + width] = -np.inf
    return found


def _target_of(name: str, completion: list[int]) -> Any:
    """The number of a sequence that ends with these tokens: [1]."""

    def number(outputs: Any) -> torch.Tensor:
        import torch

        logits = logits_of(outputs)
        if logits.dim() != 3 or logits.shape[1] <= len(completion):
            raise InvalidArgumentError(
                f"the model gives logits {list(logits.shape)}; a language model's are "
                "[1, tokens, vocabulary], a row for each token",
                field="model",
            )
        if max(completion) >= logits.shape[2]:
            raise InvalidArgumentError(
                f"token {max(completion)} is beyond the model's vocabulary of {logits.shape[2]}; "
                "is the tokenizer the model's own?",
                field="tokenizer",
            )
        said = logits[0, -len(completion) - 1 : -1]
        tokens = torch.tensor(completion, device=said.device)[:, None]
        mine = said.gather(1, tokens)[:, 0]
        if name == "margin":
            said = said.scatter(1, tokens, float("-inf"))
        return (mine - said.logsumexp(1)).sum()[None]

    return number


def _device(model: Any) -> Any:
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return None if first is None else first.device


def _ids(documents: Sequence[Any]) -> list[Any]:
    """Ids of payloads; what can't be one has none."""
    return [d if isinstance(d, (int, str)) and not isinstance(d, bool) else None for d in documents]
