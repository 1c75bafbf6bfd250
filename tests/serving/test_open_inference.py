"""The Open Inference Protocol: Triton's own client, and what it cannot send."""

import asyncio
import json
import pathlib
import subprocess
import sys
import time

import grpc
import pytest
from fake_engine import FakeEngine
from harness import on_server, running, status_of

from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.protos import open_inference_pb2_grpc
from tpuspec.serving import inference_messages
from tpuspec.serving.client import error_details, make_request

CHILD = pathlib.Path(__file__).with_name("triton_child.py")
Tensor = oip.ModelInferRequest.InferInputTensor


@pytest.mark.skipif(sys.platform != "linux", reason="tritonclient is for Linux only")
def test_tritonclient_works_unchanged():
    async def body(it):
        child = await asyncio.to_thread(
            subprocess.run, [sys.executable, CHILD, it.address], capture_output=True, text=True,
            timeout=120)
        assert child.returncode == 0, child.stderr
        check(json.loads(child.stdout), own=(await it.answer(
            [10], temperature=0.5, seed=7, max_new_tokens=12)).ids)
        await it.until_idle()  # the cancelled stream's slot, too

    on_server(body, FakeEngine(step_seconds=0.01))


def check(seen: dict, own: list[int]) -> None:
    """Compares with what the fake engine's outputs are by hand."""
    assert seen["live"] and seen["ready"]
    assert seen["models ready"] == [True, True, False, False]
    assert seen["server"]["name"] == "tpuspec"
    assert seen["model"]["name"] == "count" and seen["model"]["versions"] == ["1"]
    assert seen["model"]["inputs"] == [
        {"name": "text_input", "datatype": "BYTES", "shape": ["1"]},
        {"name": "input_ids", "datatype": "INT32", "shape": ["-1"]}]
    config = seen["config"]["config"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["dynamic_batching"] == {"priority_levels": "201", "default_priority_level": "101"}
    before, after = (seen[what]["model_stats"] for what in ("statistics before", "statistics"))
    assert before == [{"name": "count", "version": "1", "inference_stats": {
        "success": {}, "fail": {}, "queue": {}, "compute_infer": {}}}]
    assert after[0]["inference_count"] == after[0]["inference_stats"]["success"]["count"] == "4"
    assert after[0]["inference_stats"]["fail"]["count"] == "1"  # that was out of time
    assert [tensor["data_type"] for tensor in config["output"]] == [
        "TYPE_STRING", "TYPE_INT32", "TYPE_STRING"]
    assert seen["no such model"]["status"] == "StatusCode.NOT_FOUND"
    assert seen["no such call"]["status"] == "StatusCode.UNIMPLEMENTED"

    assert seen["text"] == {
        "id": "a", "model": ["count", "1"], "text_output": ["one two three four five six"],
        "token_ids": [31, 32, 33, 34, 35, 36], "finish_reason": ["length"],
        "parameters": {"triton_final_response": True, "drafted": 6, "accepted": 5, "alpha": 1.0,
                       "c": 0.25}}
    assert seen["ids"]["token_ids"] == [11, 12, 13, 14, 15, 1]
    assert seen["ids"]["finish_reason"] == ["eos_token"] and "text_output" not in seen["ids"]
    assert seen["ids"]["id"] == ""
    assert seen["sampled"]["token_ids"] == own != [*range(11, 23)]
    assert seen["stopped"]["text_output"] == ["one two "]
    assert seen["stopped"]["finish_reason"] == ["stop_sequence"]
    assert seen["out of time"]["status"] == "StatusCode.DEADLINE_EXCEEDED"
    for what, message in (("out of bounds", "parameters.top_p must be in (0, 1], got 1.5"),
                          ("unknown", "parameters.colour is not an option of this server"),
                          ("sequence", "parameters.sequence_")):
        assert seen[what]["status"] == "StatusCode.INVALID_ARGUMENT"
        assert seen[what]["error"].startswith(message)

    def of(responses: list[dict], request_id: str) -> list[dict]:
        return [r for r in responses if r.get("id") == request_id]

    def flags(responses: list[dict]) -> list[bool]:
        return [r["parameters"]["triton_final_response"] for r in responses]

    def ids(responses: list[dict]) -> list[int]:
        return [i for r in responses for i in r.get("token_ids", ())]

    for number in range(3):
        mine, start = of(seen["three on a stream"], f"r{number}"), 10 + 100 * number
        assert ids(mine) == [*range(start + 1, start + 10), 1]
        assert flags(mine) == [False, False, True]  # on the last data, of its own accord
        assert [r["parameters"]["accepted"] for r in mine] == [3, 3, 2]
        assert mine[-1]["finish_reason"] == ["eos_token"] and "finish_reason" not in mine[0]
    *data, final = seen["empty final"]
    assert ids(data) == [*range(11, 20), 1] and flags(data) == [False] * 3
    assert final == {"id": "e", "model": ["count", "1"],
                     "parameters": {"triton_final_response": True}}
    errors = [r["error"] for r in seen["errors"] if "error" in r]
    assert sorted(errors) == [
        "[request id: bad] INVALID_ARGUMENT: parameters.top_k must be in [0, 2147483647], got -1",
        "[request id: lost] NOT_FOUND: the model here is 'count', version '1'; another was "
        "asked for"]
    assert ids(of(seen["errors"], "good")) == [*range(11, 20), 1]
    assert ids(seen["half-closed"]) == [*range(11, 20), 1]
    status, = seen["as a status"]
    assert status["status"] == "StatusCode.INVALID_ARGUMENT"
    for name in ("x", "y"):
        assert ids(of(seen["asyncio"], name)) == [*range(11, 20), 1]
        assert flags(of(seen["asyncio"], name)) == [False, False, True]


def stub(channel) -> open_inference_pb2_grpc.GRPCInferenceServiceStub:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def text(value: bytes = b"zero", **fields) -> oip.ModelInferRequest:
    """With explicit contents, as clients of other languages send them."""
    return oip.ModelInferRequest(**{"model_name": "count", "inputs": [Tensor(
        name="text_input", datatype="BYTES", shape=[1],
        contents=oip.InferTensorContents(bytes_contents=[value]))]} | fields)


def ids(values=(10, 3), **fields) -> oip.ModelInferRequest:
    return oip.ModelInferRequest(**{"model_name": "count", "inputs": [Tensor(
        name="input_ids", datatype="INT32", shape=[1, len(values)],
        contents=oip.InferTensorContents(int_contents=values))]} | fields)


def test_contents_may_be_explicit():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            response = await stub(channel).ModelInfer(text(parameters={
                "max_tokens": oip.InferParameter(int64_param=3)}))
            assert response.raw_output_contents[0] == b"\x0d\0\0\0one two three"
            response = await stub(channel).ModelInfer(ids())
            assert [output.name for output in response.outputs] == [
                "text_output", "token_ids", "finish_reason"]
            assert response.raw_output_contents[1] == bytes(
                b for i in (11, 12, 13, 1) for b in (i, 0, 0, 0))

    on_server(body)


def changed(request: oip.ModelInferRequest, **tensor) -> oip.ModelInferRequest:
    request.inputs[0].MergeFrom(Tensor(**tensor))
    return request


FLAG = oip.InferParameter(bool_param=True)


@pytest.mark.parametrize("request_, message", [
    (text(model_name="other"), None),
    (text(model_version="2"), None),
    (text(inputs=[]), "inputs must be one of text_input and input_ids, got 0 tensors"),
    (text(inputs=[*text().inputs, *ids().inputs]), "inputs must be one of .*, got 2 tensors"),
    (text(raw_input_contents=[b"a"]), "raw_input_contents must be empty where inputs have"),
    (ids(inputs=[Tensor(name="input_ids", datatype="INT32", shape=[2])],
         raw_input_contents=[b"1234", b"1234"]), "raw_input_contents must be one for each"),
    (ids(inputs=[Tensor(name="input_ids", datatype="INT32", shape=[2])],
         raw_input_contents=[b"12345"]), "raw_input_contents.0. must be of INT32, got 5 bytes"),
    (ids(inputs=[Tensor(name="text_input", datatype="BYTES", shape=[1])],
         raw_input_contents=[b"\x05\0\0\0abc"]), "raw_input_contents.0. must have 5 bytes"),
    (ids(inputs=[Tensor(name="text_input", datatype="BYTES", shape=[2])],
         raw_input_contents=[b"\0\0\0\0\x01\0\0\0a"]), "text_input must have 1 element, got 2"),
    (changed(text(), shape=[2]), "inputs.0..shape must hold the 1 elements .*, got .1, 2."),
    (changed(text(), shape=[-1]), "inputs.0..shape must hold"),
    (changed(text(), shape=[1] * 9), "inputs.0..shape must hold"),
    (changed(text(), datatype="INT32"), "inputs.0..datatype must be BYTES for text_input"),
    (changed(ids(), datatype="INT64"), "inputs.0..datatype must be INT32 for input_ids"),
    (changed(text(), name="image"), "inputs.0..name must be text_input or input_ids"),
    (changed(text(), parameters={"a": FLAG}), "inputs.0..parameters must be empty, got 1"),
    (text(b"\xff"), "text_input must be UTF-8: invalid start byte at byte 0"),
    (ids((5, 2000)), r"input_ids.1. must be in .0, 1999., got 2000"),
    (ids(()), "input_ids must have at least 1 id, got 0"),
    (text(id="a" * 257), "id must have 0 to 256 characters, got 257"),
    (text(outputs=[dict(name="logits")]), "outputs.0..name must be one of text_output, token_ids"),
    (text(outputs=[dict(name="token_ids", parameters={"classification": FLAG})]),
     "outputs.0..parameters must be empty, got 1"),
    (text(parameters={"max_tokens": oip.InferParameter(int64_param=101)}),
     r"parameters.max_tokens must be in .1, 100., got 101"),
    (text(parameters={"max_tokens": oip.InferParameter(bool_param=True)}),
     r"parameters.max_tokens must be an integer of its size, got True"),
    (text(parameters={"max_new_tokens": oip.InferParameter(int64_param=1)}),
     r"parameters.max_new_tokens is not an option: max_tokens is"),
    (text(parameters={"timeout": oip.InferParameter(int64_param=-1)}),
     r"parameters.timeout must be at least 0, got -1"),
    (text(parameters={"priority": oip.InferParameter(uint64_param=202)}),
     r"parameters.priority must be an integer in .0, 201."),
    (text(parameters={"priority": FLAG}), "parameters.priority must be an integer in"),
    (text(parameters={"n": oip.InferParameter(int64_param=2)}),
     "parameters.n is not an option of this server"),
    (text(parameters={"timeout": FLAG}), "parameters.timeout is not an option"),
    (text(parameters={"top_k": oip.InferParameter()}), "parameters.top_k must have a value"),
    (text(parameters={"a b": FLAG}), "parameters must have names of 1 to 64 letters, digits and"),
    (text(parameters={"a" * 100_000: FLAG}), "parameters must have names of 1 to 64 letters"),
])
def test_what_is_wrong_is_named_and_the_stream_goes_on(request_, message):
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await stub(channel).ModelInfer(request_)
            error = caught.value
            if message is None:
                assert error.code() is grpc.StatusCode.NOT_FOUND
            else:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                violation, = error_details(error).violations
                assert error.details().startswith(violation.field + " ")
            call = stub(channel).ModelStreamInfer(iter([request_, ids(id="good")]))
            answers = [response async for response in call]
            failed, = (r for r in answers if r.error_message)
            assert failed.error_message.endswith(f": {error.details()}")
            assert failed.infer_response.id == request_.id[:256]
            good = [r.infer_response for r in answers if not r.error_message]
            assert good and all(r.id == "good" for r in good)

    on_server(body)


def test_triton_priorities_are_ours_the_other_way_round():
    for level, ours in ((0, 0), (101, 0), (1, 100), (201, -100), (100, 1)):
        request = text(parameters={"priority": oip.InferParameter(uint64_param=level)})
        assert inference_messages.asked(request).message.priority == ours


def test_lowest_level_leaves_the_queue_first():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            running = [it.client.generate(make_request([10], max_new_tokens=20)) for _ in range(2)]
            for stream in running:
                await anext(stream)
            call = stub(channel).ModelStreamInfer(iter([
                ids((10, 2), id=str(level), parameters={
                    "priority": oip.InferParameter(uint64_param=level)})
                for level in (150, 0, 50, 1)]))
            ended = [r.infer_response.id async for r in call if r.infer_response.parameters[
                "triton_final_response"].bool_param]
            assert ended[:2] == ["1", "50"] and ended[2:] == ["0", "150"]
            for stream in running:
                await stream.aclose()

    on_server(body, FakeEngine(step_seconds=0.05))


def test_statistics_are_sums_over_requests_of_every_dialect():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            began = time.time()
            await stub(channel).ModelInfer(ids((10, 7)))  # 2 steps
            await it.answer([10, 11])  # 3
            await status_of(it.answer([13, 9]))  # non-finite logits in the first one
            stream = it.client.generate(make_request([10]))
            await anext(stream)
            await stream.aclose()
            await it.until_idle()
            steps = it.engine.steps
            found, = (await stub(channel).ModelStatistics(
                oip.ModelStatisticsRequest(name="count"))).model_stats
            sums = found.inference_stats
            assert (found.inference_count, found.execution_count) == (2, steps)
            assert sums.success.count == sums.queue.count == sums.compute_infer.count == 2
            assert sums.fail.count == 2 and sums.fail.ns >= 2 * 20e6
            # Both were let in at once, and ran for 5 steps of 20 ms.
            assert abs(sums.success.ns - sums.queue.ns - sums.compute_infer.ns) <= 1
            assert 5 * 20e6 <= sums.compute_infer.ns <= 1e9 * (time.time() - began)
            assert began <= 1e-3 * found.last_inference + 1e-3 <= time.time()
            for name, version in (("other", ""), ("count", "2"), ("", "2")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub(channel).ModelStatistics(
                        oip.ModelStatisticsRequest(name=name, version=version))
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    on_server(body, FakeEngine(step_seconds=0.02))


def test_unknown_field_numbers_are_refused():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for more, path in ((bytes([0x42, 1, 65]), "8"),
                               (bytes([0x2a, 4, 0x42, 2, 65, 66]), "inputs.8")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(text().SerializeToString() + more)
                assert error_details(caught.value).violations[0].field == path

    on_server(body)


def test_cancelling_a_stream_frees_all_its_slots():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = stub(channel).ModelStreamInfer()
            for number in range(5):
                await call.write(ids((10,), id=str(number)))
            await call.read()
            call.cancel()
            load = await it.until_idle()
            assert load.cancelled == 5 and load.finished == 0
            assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    on_server(body, FakeEngine(step_seconds=0.02))


def test_drain_finishes_the_requests_of_a_stream_and_ends_idle_ones():
    async def main():
        async with running(FakeEngine(step_seconds=0.02)) as it, \
                grpc.aio.insecure_channel(it.address) as channel:
            idle, busy = stub(channel).ModelStreamInfer(), stub(channel).ModelStreamInfer()
            await idle.write(ids())
            while not (await idle.read()).infer_response.parameters[
                    "triton_final_response"].bool_param:
                pass
            await busy.write(ids((10, 30)))
            await busy.read()
            drain = asyncio.ensure_future(it.server.drain(20.0))
            found = []
            with pytest.raises(grpc.aio.AioRpcError):
                while True:
                    found.append((await busy.read()).infer_response)
            assert found[-1].parameters["triton_final_response"].bool_param
            for call in (idle, busy):
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
                assert await call.details() == "the server is shutting down"
            assert await asyncio.wait_for(drain, 5)

    asyncio.run(main())


def test_more_requests_than_fit_are_refused_one_by_one():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            requests = [ids((10, 9), id=str(number)) for number in range(30)]
            answers = [r async for r in stub(channel).ModelStreamInfer(iter(requests))]
            refused = {r.infer_response.id for r in answers if r.error_message}
            assert all("RESOURCE_EXHAUSTED: the queue is full" in r.error_message
                       for r in answers if r.error_message)
            finals = [r.infer_response.id for r in answers if r.infer_response.parameters[
                "triton_final_response"].bool_param]
            assert sorted(finals) == sorted(str(number) for number in range(30))
            assert 4 <= 30 - len(refused) < 30

    on_server(body, FakeEngine(step_seconds=0.02), queue_limit=2)


def test_stream_that_is_never_read_holds_nobody_up():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            stuck = stub(channel).ModelStreamInfer()
            for number in range(20):  # half a megabyte: more than often fits on the way
                await stuck.write(ids((10,), id=f"{number} " + "a" * 200, parameters={
                    "draft_length": oip.InferParameter(int64_param=0)}))
            while (await it.client.get_model()).load.accepted < 20:
                await asyncio.sleep(0.01)
            assert (await it.answer([10, 20])).ids == [*range(11, 31), 1]
            load = await it.until_idle(20)
            assert load.finished == 21
            await stuck.done_writing()
            answers = [response.infer_response async for response in stuck]
            for number in range(20):
                raw = b"".join(r.raw_output_contents[1] for r in answers
                               if r.id.startswith(f"{number} "))
                assert raw == b"".join(i.to_bytes(4, "little") for i in range(11, 111))

    on_server(body)
