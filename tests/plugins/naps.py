"""Lets servers of tests end sooner: uvicorn looks ten times a second whether it shall, and naps before it does."""

import asyncio
from typing import Any

import uvicorn.server

TIMES = 10


class ShortNaps:
    """asyncio, in which one sleeps for a tenth of the time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / TIMES)


def shorten() -> None:
    """Give uvicorn's server short naps, in this process and its forks."""
    uvicorn.server.asyncio = ShortNaps()  # type: ignore[assignment]
