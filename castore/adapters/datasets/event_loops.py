"""Closes the event loops that `datasets` opens for coroutine functions, and leaves open.

`map` and `filter` make a loop for each call. A step that runs block by block makes one for each block, and
each holds three files open until the collector finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def loops_closed(function: Any) -> Iterator[Any]:
    """The function for one call of `map` or `filter`, whose event loop is closed at the end.

    Args:
        function: any operator; one that is no coroutine function is given back as it is.
    """
    if not inspect.iscoroutinefunction(function):
        yield function
        return
    loops: set[asyncio.AbstractEventLoop] = set()

    @functools.wraps(function)
    async def noted(*arguments: Any, **keywords: Any) -> Any:
        loops.add(asyncio.get_running_loop())
        return await function(*arguments, **keywords)

    try:
        yield noted
    finally:
        for loop in loops:
            loop.close()
