"""The engine's own settings of torch and NumPy, whatever its caller has in force.

Autocast would multiply in bfloat16 where bounds assume float32; a default device would put tensors
elsewhere than the mapped memory that they go with; inference mode makes tensors that other threads
can't fill. Where NumPy is to warn or raise, numbers beyond float32 would be no answer: they are
infinite. All of these belong to the calling thread, and are as before once the engine is done. How
precisely the process lets torch multiply can't be set for one thread: it is asked, and what would
be inexact goes in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def own_settings() -> Iterator[None]:
    """Full precision, tensors on the CPU unless said otherwise, no autograd, NumPy's infinities
    without a word; a decorator too."""
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def multiplies_in_float32() -> bool:
    """Whether torch computes float32 products in float32, on CPU and GPU: no TF32, no bfloat16."""
    # Not there in older versions of torch, which have the last setting alone.
    for backend in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)):
        if getattr(backend, "fp32_precision", "ieee") not in ("ieee", "none"):
            return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # since somebody used the settings above, which have had their say
        return True
