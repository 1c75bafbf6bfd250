"""What a user of tritonclient.grpc sees of the server whose address is the argument, as JSON.

A program of its own: a process can have the messages of package ``inference`` once only,
and the server's process has ours.
"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException


def text_input(text: str) -> list[triton.InferInput]:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
    return [tensor]


def ids_input(ids: list[int]) -> list[triton.InferInput]:
    tensor = triton.InferInput("input_ids", [len(ids)], "INT32")
    tensor.set_data_from_numpy(np.array(ids, np.int32))
    return [tensor]


def shown(result) -> dict:
    response = result.get_response()
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    return {
        "id": response.id, "model": [response.model_name, response.model_version],
        "parameters": {name: getattr(p, p.WhichOneof("parameter_choice"))
                       for name, p in response.parameters.items()},
        **{name: [x.decode() if isinstance(x, bytes) else int(x) for x in value]
           for name, value in outputs.items()}}


def shown_error(error: InferenceServerException) -> dict:
    return {"error": error.message(), "status": error.status()}


class Stream:
    """Responses and errors of one bidirectional stream, in the order of arrival."""

    def __init__(self, client, **options):
        self.got: queue.Queue = queue.Queue()
        client.start_stream(
            lambda result, error: self.got.put(shown(result) if error is None
                                               else shown_error(error)), **options)

    def until_finals(self, count: int) -> list[dict]:
        """Everything up to so many final responses or errors."""
        found = []
        while count:
            found.append(self.got.get(timeout=20))
            final = "error" in found[-1] or found[-1]["parameters"]["triton_final_response"]
            count -= final
        return found


def refused(call) -> dict:
    try:
        return {"no error": str(call())}
    except InferenceServerException as error:
        return shown_error(error)


async def by_asyncio(address: str) -> list[dict]:
    async def requests():
        for name in ("x", "y"):
            yield {"model_name": "count", "inputs": ids_input([10, 9]), "request_id": name}

    async with triton_aio.InferenceServerClient(address) as client:
        found = []
        async for result, error in client.stream_infer(requests()):
            found.append(shown(result) if error is None else shown_error(error))
        return found


def main(address: str) -> None:
    client = triton.InferenceServerClient(address)
    seen = {
        "live": client.is_server_live(), "ready": client.is_server_ready(),
        "models ready": [client.is_model_ready(*model) for model in (
            ("count",), ("count", "1"), ("count", "2"), ("other",))],
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata("count", as_json=True),
        "config": client.get_model_config("count", as_json=True),
        "statistics before": client.get_inference_statistics(as_json=True),
        "no such model": refused(lambda: client.get_model_metadata("other")),
        "no such call": refused(lambda: client.get_model_repository_index()),
        "text": shown(client.infer("count", text_input("zero"), request_id="a",
                                   parameters={"max_tokens": 6, "temperature": 0})),
        "ids": shown(client.infer("count", ids_input([10, 5]), outputs=[
            triton.InferRequestedOutput("token_ids"),
            triton.InferRequestedOutput("finish_reason")])),
        "sampled": shown(client.infer("count", ids_input([10]), parameters={
            "temperature": 0.5, "seed": 7, "max_tokens": 12, "top_p": 1})),
        "stopped": shown(client.infer("count", text_input("zero"), parameters={
            "stop": "three"}, priority=1)),
        "out of time": refused(lambda: client.infer("count", ids_input([10]), timeout=1)),
        "out of bounds": refused(lambda: client.infer("count", ids_input([10]),
                                                      parameters={"top_p": 1.5})),
        "unknown": refused(lambda: client.infer("count", ids_input([10]),
                                                parameters={"colour": "red"})),
        "sequence": refused(lambda: client.infer("count", ids_input([10]), sequence_id=5)),
        "statistics": client.get_inference_statistics("count", "1", as_json=True),
    }

    stream = Stream(client)
    for number in range(3):
        client.async_stream_infer("count", ids_input([10 + 100 * number, 9]),
                                  request_id=f"r{number}")
    seen["three on a stream"] = stream.until_finals(3)
    client.async_stream_infer("count", ids_input([10, 9]), request_id="e",
                              enable_empty_final_response=True)
    seen["empty final"] = stream.until_finals(1)
    client.async_stream_infer("count", ids_input([10, 9]), request_id="bad",
                              parameters={"top_k": -1})
    client.async_stream_infer("other", ids_input([10, 9]), request_id="lost")
    client.async_stream_infer("count", ids_input([10, 9]), request_id="good")
    seen["errors"] = stream.until_finals(3)
    client.async_stream_infer("count", ids_input([10, 9]), request_id="late")
    client.stop_stream()  # half-closes: what is asked is still answered
    seen["half-closed"] = stream.until_finals(1)

    stream = Stream(client, headers={"triton_grpc_error": "true"})
    client.async_stream_infer("count", ids_input([10, 9]), parameters={"top_k": -1})
    seen["as a status"] = stream.until_finals(1)
    client.stop_stream()

    stream = Stream(client)
    client.async_stream_infer("count", ids_input([10]), request_id="endless")
    stream.got.get(timeout=20)
    client.stop_stream(cancel_requests=True)
    seen["asyncio"] = asyncio.run(by_asyncio(address))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
