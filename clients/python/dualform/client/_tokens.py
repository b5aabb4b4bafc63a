"""What tokenizers give, checked, and whether a model takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dualform.client.errors import InvalidArgumentError


class Tokenizer(Protocol):
    """What is needed of a tokenizer: Hugging Face's have it."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what has not both ways.

    Raises:
        InvalidArgumentError: So.
    """
    for name in ("encode", "decode"):
        if not callable(getattr(tokenizer, name, None)):
            raise _refused(f"is of type {type(tokenizer).__name__} and has no {name}()")
    if isinstance(tokenizer, type):
        raise _refused(f"is the class {tokenizer.__name__} and not one of its instances")


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens, without those that mark its beginning and end.

    Raises:
        InvalidArgumentError: The tokenizer fails, or gives no list of integers.
    """
    try:
        try:
            found: Any = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[call-arg]
        except TypeError:
            found = tokenizer.encode(text)
    except Exception as error:  # theirs
        raise _refused(f"fails on {_short(text)}: {type(error).__name__}: {error}") from error
    found = getattr(found, "ids", found)  # the tokenizers package's Encoding
    if hasattr(found, "tolist"):  # an array or a tensor
        found = found.tolist()
    if not isinstance(found, (list, tuple)):
        raise _refused(f"encodes {_short(text)} as {type(found).__name__}, not as a list of tokens")
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            token = getattr(token, "item", lambda token=token: token)()
            if isinstance(token, bool) or not isinstance(token, int):
                raise _refused(f"encodes {_short(text)} with {_short(token)}, which is no integer")
        if not 0 <= token < 1 << 63:
            raise _refused(f"encodes {_short(text)} with the token {token}, which no model has")
    return [int(token) for token in found]


def decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of tokens.

    Raises:
        InvalidArgumentError: The tokenizer fails, or gives no text.
    """
    try:
        found: Any = tokenizer.decode(tokens)
    except Exception as error:  # theirs
        raise _refused(f"fails on {_short(tokens)}: {type(error).__name__}: {error}") from error
    if not isinstance(found, str):
        raise _refused(f"decodes {_short(tokens)} to {type(found).__name__}, not to text")
    return found


def check_taken(model: Any, tokens: Sequence[int]) -> None:
    """Refuse what a model's tables have no rows for, as far as the model says what they have.

    Raises:
        InvalidArgumentError: A token beyond its vocabulary, or more tokens than its context.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        return  # which is refused where it is run
    ask = getattr(model, "get_input_embeddings", None)
    try:
        table = ask() if callable(ask) else None
    except Exception:  # transformers' base class has none
        table = None
    if isinstance(table, torch.nn.Embedding) and max(tokens) >= table.num_embeddings:
        raise beyond_vocabulary(max(tokens), table.num_embeddings)
    context = _context(model)
    if context is None or len(tokens) <= context:
        return
    # A limit only where positions are looked up; some tables have two more rows, for pads.
    for module in model.modules():
        looked_up = isinstance(module, torch.nn.Embedding) and module is not table
        if looked_up and module.num_embeddings in (context, context + 2):
            raise InvalidArgumentError(
                f"prompt and completion are {len(tokens)} tokens together, and the model's "
                f"context is {context}; shorten the prompt",
                field="prompt",
            )


def not_taken(model: Any, tokens: Sequence[int], error: IndexError) -> InvalidArgumentError:
    """Of tokens on which a model's look-up failed."""
    context = _context(model)
    said = "" if context is None else f" (its config says {context})"
    return InvalidArgumentError(
        f"the model does not take these {len(tokens)} tokens, of which the largest is "
        f"{max(tokens)} ({error}): either that is beyond its vocabulary, and the tokenizer is not "
        f"the model's own, or they are more than its context{said}",
        field="tokenizer",
    )


def beyond_vocabulary(token: int, size: int) -> InvalidArgumentError:
    """Of a token that a model has not."""
    return InvalidArgumentError(
        f"token {token} is beyond the model's vocabulary of {size}; is the tokenizer the model's "
        "own?",
        field="tokenizer",
    )


def _context(model: Any) -> int | None:
    config = getattr(model, "config", None)
    for name in ("n_positions", "max_position_embeddings"):
        found = getattr(config, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


def _refused(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"tokenizer {what}; one with encode(text), which gives a list of integers, and "
        "decode(tokens), which gives text, is needed, as transformers' are",
        field="tokenizer",
    )


def _short(given: Any) -> str:
    said = repr(given)
    return said if len(said) <= 60 else f"{said[:57]}..."
