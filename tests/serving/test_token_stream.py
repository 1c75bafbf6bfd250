"""One channel of one request, from any thread to one reader."""

import asyncio
import threading

import pytest

from tpuspec.measurement import SpeculationStats
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.request import Ending, Finish, Origin, Timings, Token, TokenChunk
from tpuspec.serving.token_stream import TokenStream

FINISH = Finish(ending=Ending.EOS, stop="", seed=0, decode_tokens=0,
                timings=Timings(queue=0, first_token=0, decode=0, total=0))


def chunk(number: int, *, last: bool = False) -> TokenChunk:
    return TokenChunk(tokens=(Token(number, Origin.PLAIN, f"{number} "),),
                      steps=SpeculationStats(steps=1, emitted=1),
                      stats=SpeculationStats(steps=number, emitted=number),
                      finish=FINISH if last else None)


def test_consumer_slower_than_producer_gets_all_tokens_in_order_in_few_chunks():
    async def main():
        stream = TokenStream()
        thread = threading.Thread(target=lambda: [
            stream.put(chunk(n, last=n == 5000)) for n in range(1, 5001)])
        thread.start()
        chunks = []
        async for one in stream:
            chunks.append(one)
            await asyncio.sleep(0.02)
        thread.join()
        return chunks

    chunks = asyncio.run(main())
    assert [token.id for one in chunks for token in one.tokens] == list(range(1, 5001))
    assert len(chunks) < 100
    assert [one.finish is not None for one in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(one.steps.emitted for one in chunks) == chunks[-1].stats.emitted == 5000


def test_error_comes_after_the_chunks_before_it_and_ends_the_stream():
    async def main():
        stream = TokenStream()
        stream.put(chunk(1))
        stream.fail(RequestError(ErrorCode.INTERNAL, "first"))
        stream.fail(RequestError(ErrorCode.UNAVAILABLE, "second"))
        assert (await anext(stream)).tokens[0].id == 1
        with pytest.raises(RequestError, match="first"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_putting_after_the_readers_event_loop_has_closed_is_harmless():
    async def main():
        return TokenStream()

    stream = asyncio.run(main())
    stream.put(chunk(1))
    stream.fail(RequestError(ErrorCode.INTERNAL, "nobody reads this"))
