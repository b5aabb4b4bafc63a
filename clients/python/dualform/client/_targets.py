"""The number of each input that is attributed: a logit, a margin, a loss, or any function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dualform.client.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

Target: TypeAlias = "int | str | Callable[[Any], torch.Tensor] | object"

WORDS = ("margin", "loss")


def target_of(outputs: Any, target: Target, labels: object, token: object) -> torch.Tensor:
    """One number for each input, with its graph: [n].

    Args:
        outputs: What the model gave.
        target: A class (one, or one for each input), "margin", "loss", or a function of `outputs`
            that gives [n].
        labels: The classes of "loss", and of "margin" where it is not the predicted one's.
        token: Of outputs [n, tokens, classes], the place whose logits are meant.

    Raises:
        InvalidArgumentError: They do not go together, or a number is not finite.
    """
    import torch

    if callable(target):
        for name, value in (("labels", labels), ("token", token)):
            if value is not None:
                raise _wrong(f"{name} goes with a class, 'margin' or 'loss'; a function of the "
                             "outputs knows them itself", name)  # fmt: skip
        found = target(outputs)
    else:
        found = _named(logits_of(outputs), target, labels, token)
    if isinstance(found, torch.Tensor) and found.shape == (0,):
        raise _wrong("there are no inputs: the target gave a tensor [0]; at least one is needed",
                     "inputs")  # fmt: skip
    if not isinstance(found, torch.Tensor) or found.dim() != 1 or not found.numel():
        given = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise _wrong(f"the target gave {given}; a tensor [n] is needed, one number for each input")
    if not found.requires_grad:
        raise _wrong("the target does not depend on the model: no gradient flows back from it; "
                     "leave out detach(), argmax(), .item() and the like")  # fmt: skip
    if found.is_complex():
        raise _wrong(f"the target gave {found.dtype}; real numbers are needed, such as its abs()")
    odd = torch.nonzero(~torch.isfinite(found.detach()))
    if len(odd):
        place = int(odd[0])
        raise _wrong(
            f"the target of input {place} is {float(found[place].detach())}; it must be finite"
        )
    return found


def logits_of(outputs: Any) -> torch.Tensor:
    """The logits in what a model gave: a tensor, or what Hugging Face's models give."""
    import torch

    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif not isinstance(outputs, torch.Tensor):
        outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor) or not 1 <= outputs.dim() <= 3:
        given = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise _wrong(
            f"the model gives {given}; a class, 'margin' and 'loss' are about logits [n, classes] "
            "or [n, tokens, classes]: pass a function of the outputs as target"
        )
    return outputs[:, None] if outputs.dim() == 1 else outputs


def _named(logits: torch.Tensor, target: object, labels: object, token: object) -> torch.Tensor:
    n = len(logits)
    if isinstance(target, str):
        if target not in WORDS:
            raise _wrong(f"target={target!r} is none of 'margin', 'loss'; or pass a class, or a "
                         "function of the outputs")  # fmt: skip
        if target == "loss":
            return _loss(logits, labels, token)
        return _margin(_at(logits, token), labels)
    if labels is not None:
        raise _wrong("labels go with target='loss' or 'margin'; a class is a target itself",
                     "labels")  # fmt: skip
    logits = _at(logits, token)
    classes = _classes(target, "target", n, logits.shape[1])
    return logits.gather(1, classes.to(logits.device)[:, None])[:, 0]


def _margin(logits: torch.Tensor, labels: object) -> torch.Tensor:
    """The logit of a class less the logsumexp of the others: the log of its odds."""
    n, classes = logits.shape
    if classes < 2:
        raise _wrong("a margin is between classes, and the model gives one number for each input; "
                     "pass target=0 for it")  # fmt: skip
    chosen = logits.detach().argmax(1)
    if labels is not None:
        chosen = _classes(labels, "labels", n, classes).to(logits.device)
    mine = logits.gather(1, chosen[:, None])[:, 0]
    others = logits.scatter(1, chosen[:, None], float("-inf"))
    return mine - others.logsumexp(1)


def _loss(logits: torch.Tensor, labels: object, token: object) -> torch.Tensor:
    """The cross-entropy with the labels; of a sequence the sum over its tokens."""
    import torch

    if labels is None:
        raise _wrong("target='loss' needs labels=, the class of each input", "labels")
    n = len(logits)
    if logits.dim() == 3 and token is None:
        given = _integers(labels, "labels")
        if given.shape != logits.shape[:2]:
            raise _wrong(f"labels have shape {list(given.shape)} and the logits "
                         f"{list(logits.shape)}: [n, tokens] is needed, -100 where there is none, "
                         "or token= with one label for each input", "labels")  # fmt: skip
        odd = given[(given != -100) & ((given < 0) | (given >= logits.shape[2]))]
        if len(odd):
            raise _wrong(f"labels holds {int(odd[0])}; the outputs have {logits.shape[2]}, so it "
                         f"is one of 0 to {logits.shape[2] - 1}, or -100 where there is none",
                         "labels")  # fmt: skip
        per_token = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), given.flatten().to(logits.device), reduction="none"
        )
        return per_token.reshape(given.shape).sum(1)
    logits = _at(logits, token)
    classes = _classes(labels, "labels", n, logits.shape[1]).to(logits.device)
    return torch.nn.functional.cross_entropy(logits, classes, reduction="none")


def _at(logits: torch.Tensor, token: object) -> torch.Tensor:
    """The logits of one token of each input: [n, classes]."""
    import torch

    if logits.dim() == 2:
        if token is not None:
            raise _wrong(f"token={token!r}: the model gives logits {list(logits.shape)}, one row "
                         "for each input; leave token out", "token")  # fmt: skip
        return logits
    n, tokens, _ = logits.shape
    if token is None:
        raise _wrong(f"the model gives logits {list(logits.shape)}, a row for each of {tokens} "
                     "tokens; say which with token=, such as -1 for the last, or one for each "
                     "input", "token")  # fmt: skip
    places = _classes(token, "token", n, tokens, negative=True)
    return logits[torch.arange(n), places % tokens]


def _classes(value: object, field: str, n: int, count: int, negative: bool = False) -> torch.Tensor:
    """One class, or place, for each input: int64 [n]."""
    given = _integers(value, field)
    if given.dim() == 0:
        given = given.expand(n)
    if given.shape != (n,):
        raise _wrong(f"{field} has shape {list(given.shape)}; one number is needed, or one for "
                     f"each of the {n} inputs", field)  # fmt: skip
    low = -count if negative else 0
    odd = given[(given < low) | (given >= count)]
    if len(odd):
        raise _wrong(f"{field} holds {int(odd[0])}; the outputs have {count}, so it is one of "
                     f"{low} to {count - 1}", field)  # fmt: skip
    return given


def _integers(value: object, field: str) -> torch.Tensor:
    """int64 on the CPU, of any shape."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise _wrong(f"{field}={value!r} is no array: its lists differ in length", field) from None
    if array.dtype.kind not in "iu":
        raise _wrong(f"{field}={value!r} is no integer, nor an array of them", field)
    return torch.from_numpy(np.array(array, np.int64))


def _wrong(what: str, field: str = "target") -> InvalidArgumentError:
    return InvalidArgumentError(what, field=field)
