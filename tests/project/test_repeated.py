"""What is written twice says the same: words and numbers of questions and limits.

`dualform --help` and `serve --help` are answered without importing what defines these words and
numbers, so they repeat them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import Any, get_args

import pytest

from dualform.cli.main import make_parser
from dualform.client import Client
from dualform.engine.messages.limits import Limits
from dualform.questions import (
    MAX_RESIDUAL,
    OutputQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
    questions,
)
from dualform.serve import ServerConfig, ServerLimits


def parser_of(*words: str) -> argparse.ArgumentParser:
    parser = make_parser()
    for word in words:
        (commands,) = [
            action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        ]
        parser = commands.choices[word]
    return parser


def option(name: str, *words: str) -> argparse.Action:
    (found,) = [action for action in parser_of(*words)._actions if action.dest == name]
    return found


@pytest.mark.parametrize(
    ("command", "question", "name", "words"),
    [
        ("top-k", TopKQuestion, "order", questions.Order),
        ("top-k", TopKQuestion, "rank_by", questions.RankBy),
        ("top-k", TopKQuestion, "strategy", questions.TopKStrategy),
        ("top-groups", TopGroupsQuestion, "order", questions.Order),
        ("top-groups", TopGroupsQuestion, "rank_by", questions.RankBy),
        ("top-groups", TopGroupsQuestion, "strategy", questions.SumsStrategy),
    ],
)
def test_words_of_rankings(command: str, question: type, name: str, words: Any) -> None:
    found = option(name, "query", command)
    assert set(found.choices or ()) == set(get_args(words))
    assert found.default == getattr(question, name)


def test_strategies_of_sums_and_outputs() -> None:
    for command, words in (("sums", questions.SumsStrategy), ("output", questions.OutputStrategy)):
        assert set(option("strategy", "query", command).choices or ()) == set(get_args(words))
    assert SumsQuestion.strategy == OutputQuestion.strategy == "auto"


def test_defaults_that_the_help_names() -> None:
    for command, method in (("top-k", Client.top_k), ("top-groups", Client.top_groups)):
        k = option("k", "query", command)
        assert k.default == inspect.signature(method).parameters["k"].default
        assert f"default {k.default}" in str(k.help)
    bins = option("bins", "query", "profile")
    assert bins.default == inspect.signature(Client.profile).parameters["bins"].default
    assert f"default {bins.default}" in str(bins.help)
    for command in ("top-k", "top-groups", "output"):
        said = str(option("max_residual", "query", command).help)
        assert f"default {MAX_RESIDUAL:g}".replace("0.0001", "1e-4") in said
    host, port = option("host", "serve"), option("port", "serve")
    assert f"default {ServerConfig().host}" in str(host.help)
    assert f"default {ServerConfig().port}" in str(port.help)


def test_limits_of_a_server_and_of_a_local_index() -> None:
    said = {field.name: field.default for field in dataclasses.fields(ServerLimits)}
    for field in dataclasses.fields(Limits):
        if field.name in said:
            assert field.default == said[field.name], field.name
    assert {"max_k", "max_queries", "max_message_mib"} <= set(said)
