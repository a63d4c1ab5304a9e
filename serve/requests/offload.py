"""Work off the event loop, in threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from laconic.hardware import cores

T = TypeVar("T")

OFFLOAD_FROM = 1 << 16
"""Bytes. Smaller bodies and answers are read and written on the event loop: a thread takes 0.1 ms to answer."""

_SHORT = ThreadPoolExecutor(min(8, cores()), thread_name_prefix="short")
_LONG = ThreadPoolExecutor(max(2, cores() // 2), thread_name_prefix="long")
"""Where large requests have their pieces of work done, so that they keep no threads from small ones."""


async def offload(function: Callable[..., T], *arguments: object, long: bool = False) -> T:
    """Call the function in a thread. long: the call is one of many of a large request."""
    return await asyncio.get_running_loop().run_in_executor(_LONG if long else _SHORT, function, *arguments)
