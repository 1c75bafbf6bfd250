"""From the engine's thread to one reader in an event loop, in bounded memory."""

import asyncio
import collections
import threading
from typing import Protocol

from tpuspec.serving.errors import RequestError
from tpuspec.serving.request import TokenChunk

_MOST_CHUNKS = 16  # buffered for a slow reader; later ones are merged into the last


class ChunkSink(Protocol):
    """Where the engine's thread puts a request's chunks; neither call may block."""

    def put(self, chunk: TokenChunk) -> None: ...

    def fail(self, error: RequestError) -> None: ...


class TokenStream:
    """One channel of one request; iterate it with ``async for``, once.

    Made in the reader's event loop; ``put`` and ``fail`` may be called by any thread
    and never block. It ends after the chunk with ``finish`` (of the last sample), or by raising
    the error. A request's tokens are limited, so merging bounds what an idle reader can cost.
    """

    def __init__(self, samples: int = 1) -> None:
        self._unfinished = samples
        self._event_loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._chunks: collections.deque[TokenChunk] = collections.deque()
        self._error: RequestError | None = None

    def put(self, chunk: TokenChunk) -> None:
        with self._lock:
            place = self._place_to_merge(chunk.index)
            if place is None:
                self._chunks.append(chunk)
            else:
                self._chunks[place] = self._chunks[place].merged(chunk)
        self._wake()

    def _place_to_merge(self, index: int) -> int | None:
        """Of the sample's last chunk in a full buffer."""
        if len(self._chunks) < _MOST_CHUNKS:
            return None
        return next((place for place in reversed(range(len(self._chunks)))
                     if self._chunks[place].index == index), None)

    def fail(self, error: RequestError) -> None:
        """Ends the stream with an error, after the chunks that are in it."""
        with self._lock:
            self._error = self._error or error
        self._wake()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenChunk:
        if not self._unfinished:
            raise StopAsyncIteration
        while True:
            with self._lock:
                if self._chunks:
                    chunk = self._chunks.popleft()
                    self._unfinished -= chunk.finish is not None
                    return chunk
                if self._error is not None:
                    self._unfinished = 0
                    raise self._error
                self._ready.clear()
            await self._ready.wait()

    def _wake(self) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The event loop is closed: nobody will read.
            pass
