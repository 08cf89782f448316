"""Compresses answers for clients that accept gzip."""

import re

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

FILES = re.compile(r"/jobs/[^/]+/artifacts/.|/files/.")
"""Paths of stored files, which have a strong ETag and answer Range: both are of the bytes as they are stored."""
LEVEL = 5
"""Levels above make answers 1 % smaller and take a third more time of a core that may be measuring."""
LEAST_BYTES = 1000


class Compression(GZipMiddleware):
    """As Starlette's, which leaves event streams and compressed media types alone; stored files are sent unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, minimum_size=LEAST_BYTES, compresslevel=LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and FILES.match(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
