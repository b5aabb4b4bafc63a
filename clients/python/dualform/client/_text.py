"""Text in, text out: which documents, and which spans of them, made a language model say this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import value_of
from dualform.client._asking import Asking, Steps
from dualform.client._attributing import Attributing
from dualform.client._attribution import AttributionResult, attribution_of, join_attributions
from dualform.client._info import IndexInfo
from dualform.client._retry import Deadline
from dualform.client._scores import Collector, scores_of
from dualform.client._spans import best_spans
from dualform.client._targets import logits_of
from dualform.client._tokens import (
    Tokenizer,
    beyond_vocabulary,
    check_taken,
    check_tokenizer,
    decoded,
    encoded,
    not_taken,
)
from dualform.client.errors import InvalidArgumentError, bad_answer
from dualform.questions import IndexQuestion
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    import torch

    from dualform.client._gradients import Gradients

TEXT_TARGETS = ("logprob", "margin")


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
        said = [decoded(self.tokenizer, [token]) for token in completion]
        check_taken(self.model, prompt + completion)
        deadline = asking.deadline(timeout)
        if self.spans:
            yield from self._check_position(asking, deadline)
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
        try:
            gradients = yield from question.run(asking, deadline)
        except IndexError as error:  # a table's, on a CPU
            raise not_taken(self.model, prompt + completion, error) from error
        parts: list[AttributionResult] = []
        yield from question.ask(asking, deadline, gradients, attribution_of, parts.append)
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
            tokens=said,
            target=float(found.targets[0]),
            found=found,
        )

    def _check(self) -> None:
        if self.target not in TEXT_TARGETS:
            raise InvalidArgumentError(
                f"target={self.target!r} is none of 'logprob', 'margin'", field="target"
            )
        check_tokenizer(self.tokenizer)
        for name, least in (("spans", 0), ("width", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise InvalidArgumentError(
                    f"{name} is {value!r}; an integer, {least} or more, is needed", field=name
                )

    def _check_position(self, asking: Asking, deadline: Deadline) -> Steps[None]:
        """Refuse a column that counts no places, before the model runs."""
        question = IndexQuestion(index=self.asked["index"])
        info: IndexInfo = yield from asking.index(question, deadline.remaining())
        for layer in info.layers.values():
            kind = layer.columns.get(self.position)
            if kind not in (None, "int64", "unknown"):
                raise InvalidArgumentError(
                    f"position={self.position!r} is a column of {kind}; places in a document are "
                    "integers, counted in tokens from 0",
                    field="position",
                )
        if not any(self.position in layer.columns for layer in info.layers.values()):
            known = sorted({name for layer in info.layers.values() for name in layer.columns})
            raise InvalidArgumentError(
                f"position={self.position!r} is an unknown column; the index has "
                f"{', '.join(known) or 'none'}; spans=0 asks for documents alone",
                field="position",
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
            asking, deadline, gradients, scores_of, collector.take
        )
        found = collector.result()
        assert found.values is not None
        tokens = encoded(self.tokenizer, payload) if isinstance(payload, str) else None
        places = [(place, s) for place, s in zip(found.groups, found.values[0], strict=True)
                  if place is not None]  # fmt: skip
        if not all(isinstance(place, int) and not isinstance(place, bool) for place, _ in places):
            raise bad_answer(f"places in {self.position!r} that are no integers")
        return [
            Span(first, last, score, self._text(tokens, first, last))
            for first, last, score in best_spans(places, int(self.spans), int(self.width), order)
        ]

    def _text(self, tokens: list[int] | None, first: int, last: int) -> str | None:
        if tokens is None:
            return None
        return decoded(self.tokenizer, tokens[max(0, first) : max(0, last + 2)])


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
            raise beyond_vocabulary(max(completion), logits.shape[2])
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
