"""Waiting for something, but not for ever, and without losing a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises, if it does so in time; it is cancelled otherwise.

    `asyncio.wait_for` of Python 3.11 and before swallows a cancellation that comes as the work is
    done: a scan whose caller has gone would go on.

    Raises:
        TimeoutError: Time is up.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        # An exception that it holds holds this frame.
        del task
