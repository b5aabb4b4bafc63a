"""Which places of the training text made a prediction: two trainings, and the sums they leave."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import numpy as np
import torch

from dualform.replay import FirstRun, Replay
from runner import lm_text, lm_train
from runner.lm_config import Study, Variant

AROUND_WORDS, AROUND_CHARACTERS = 14, 70


@dataclass(frozen=True)
class Match:
    """A position of the training text.

    Attributes:
        position: Its place.
        score: Summed over every update in which it was seen.
        passage: The text around it.
    """

    position: int
    score: float
    passage: lm_text.Passage


@dataclass(frozen=True)
class Answer:
    """One prompt and what it was led by.

    Attributes:
        part: "test" or "training".
        position: Of the prompt's last token, whose key is the query.
        prompt: The text up to it and after it.
        predicted: The token that the model expects next.
        absolute: The positions with the largest sums of |q.k|.
        signed: The positions with the largest sums of q.k.
    """

    part: str
    position: int
    prompt: lm_text.Passage
    predicted: str
    absolute: list[Match]
    signed: list[Match]


@dataclass(frozen=True)
class Facts:
    """A whole run.

    Attributes:
        tokens: Of the training text.
        vocabulary: Its size.
        key: Length of a key.
        rows: Rows of the LSTM.
        epochs: How often a position was seen, about.
        perplexity: Of the test and the training text.
        seconds: First and second training, each with its recorder.
        peak_bytes: The process's largest resident memory.
        history_bytes: What the keys of all rows would take as float32.
        signed_difference: Largest difference of the signed sums kept in the first training and
            those of the replay, relative to the absolute sum of their position.
    """

    tokens: int
    vocabulary: int
    key: int
    rows: int
    epochs: float
    perplexity: dict[str, float]
    seconds: list[float]
    peak_bytes: int
    history_bytes: int
    signed_difference: float


def run(study: Study, variant: Variant, text: lm_text.Text) -> tuple[list[Answer], Facts]:
    """Train, ask, train again."""
    width = (variant.projection or variant.embedding) + variant.hidden
    first = FirstRun()
    kept = first.key_sums("rnn", "offset")
    trained = lm_train.train(variant, text, study.seed, first)
    model = trained.model
    prompts = _prompts(study, text)
    queries, predicted = _queries(model, text, prompts, study.queries.prompt)

    replay = Replay(first)
    absolute = replay.sums("rnn", queries, "offset", absolute=True)
    signed = replay.sums("rnn", queries, "offset")
    again = lm_train.train(variant, text, study.seed, replay)
    if again.losses != trained.losses:
        raise RuntimeError("the two loss curves differ")
    sums, by_keys, replayed = absolute.result(), kept.result(), signed.result()
    signed_values = by_keys.sums(queries)
    positions = [int(group) for group in sums.groups if isinstance(group, int)]
    difference = np.abs(signed_values - replayed.values) / np.maximum(sums.values, 1e-30)

    def best(values: np.ndarray) -> list[Match]:
        # By score, then position; lexsort's last key counts first.
        order = np.lexsort((np.arange(len(values)), -values))[: study.queries.top]
        return [
            Match(
                positions[i],
                float(values[i]),
                lm_text.passage(text, text.training, positions[i], _around(text)),
            )
            for i in order.tolist()
        ]

    answers = [
        Answer(
            part,
            position,
            lm_text.passage(text, _part(text, part), position, _around(text)),
            text.vocabulary[token],
            best(sums.values[number]),
            best(signed_values[number]),
        )
        for number, ((part, position), token) in enumerate(zip(prompts, predicted, strict=True))
    ]
    rows = int(sums.counts.sum())
    facts = Facts(
        tokens=len(text.training),
        vocabulary=len(text.vocabulary),
        key=width,
        rows=rows,
        epochs=trained.epochs,
        perplexity={
            "test": lm_train.perplexity(model, text.test),
            "training": lm_train.perplexity(model, text.training),
        },
        seconds=[trained.seconds, again.seconds],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        history_bytes=rows * width * 4,
        signed_difference=float(difference.max()),
    )
    return answers, facts


def _prompts(study: Study, text: lm_text.Text) -> list[tuple[str, int]]:
    """Part and place of each prompt's last token."""
    random = np.random.default_rng(study.seed)
    wanted = [("test", study.queries.test), ("training", study.queries.training)]
    return [
        (part, int(random.integers(study.queries.prompt - 1, len(_part(text, part)) - 1)))
        for part, count in wanted
        for _ in range(count)
    ]


@torch.no_grad()
def _queries(
    model: lm_train.LanguageModel,
    text: lm_text.Text,
    prompts: list[tuple[str, int]],
    length: int,
) -> tuple[np.ndarray, list[int]]:
    """The keys of the prompts' last tokens, float32 [n, d], and what the model expects next."""
    tokens = torch.stack(
        [_part(text, part)[place - length + 1 : place + 1] for part, place in prompts]
    )
    keys = model.rnn.gate_keys(model.inputs(tokens))[:, -1]
    logits, _ = model(tokens)
    expected: list[int] = logits[:, -1].argmax(1).tolist()
    return keys.numpy().copy(), expected


def _part(text: lm_text.Text, part: str) -> torch.Tensor:
    return text.test if part == "test" else text.training


def _around(text: lm_text.Text) -> int:
    return AROUND_WORDS if text.separator else AROUND_CHARACTERS
