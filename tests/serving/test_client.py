"""The shipped clients, and what becomes of them in child processes."""

import asyncio
import multiprocessing

import grpc
import pytest
from harness import Answer, on_server, try_client

from tpuspec.serving.client import BlockingClient, Client, make_request


def test_blocking_client_streams():
    async def body(it):
        def use():
            with BlockingClient(it.address) as client:
                assert client.get_model().name == "count"
                answer = Answer(list(client.generate("zero", max_new_tokens=3)))
                return answer.text, answer.reason

        assert await asyncio.to_thread(use) == ("one two three", "length")

    on_server(body)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("method, expected", [
    ("spawn", "one two"), ("fork", "a gRPC client was used before this process was forked")])
def test_client_in_a_child_process_works_or_refuses_and_never_hangs(method, expected):
    async def body(it):
        await it.answer([10, 3])
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=try_client, args=(it.address, results))
        process.start()
        assert (await asyncio.to_thread(results.get, True, 20)).startswith(expected)
        process.join()
        process.close()

    on_server(body)


def test_client_closes_with_its_context():
    async def body(it):
        async with Client(it.address) as client:
            assert (await client.get_model()).name == "count"
        with pytest.raises(grpc.aio.UsageError):
            await client.get_model()

    on_server(body)


def test_a_text_for_a_list_of_texts_is_refused():
    for stop in ("END", {"END": 1}, None):
        with pytest.raises(ValueError, match="stop must be a list of texts, got "):
            make_request("a", stop=stop)
    assert list(make_request("a", stop=("END",)).stop) == ["END"]
