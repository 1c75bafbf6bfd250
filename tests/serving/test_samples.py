"""Several samples of one request, and priorities: what comes, in what order, and what ends it."""

import asyncio
import collections
import dataclasses
import json

import batch_child
import grpc
import pytest
from fake_engine import CONFIG, FakeEngine, FakeVocabulary, sampled_id
from harness import on_server, status_of

from tpuspec.measurement import SpeculationStats
from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tpuspec.serving import batch_engine, generate
from tpuspec.serving.batch_engine import BatchEngine
from tpuspec.serving.cli import make_parser
from tpuspec.serving.client import make_request
from tpuspec.serving.output_text import OutputText
from tpuspec.serving.records import by_sample
from tpuspec.serving.request import Origin, Request, Token, TokenChunk
from tpuspec.serving.ticket import PRIORITY_SECONDS, Ticket
from tpuspec.serving.token_stream import TokenStream

THREE = dataclasses.replace(CONFIG, slots=3)
SAMPLED = dict(temperature=1.0, seed=7)


def ids_of(responses) -> list[list[int]]:
    return [[token.id for response in sample for token in response.tokens]
            for sample in by_sample(responses)]


def expected(seed: int, count: int) -> list[int]:
    return [*(sampled_id(seed, position) for position in range(count)), 1]


# ---- over gRPC -----------------------------------------------------------------


def test_samples_of_a_request_differ_and_each_can_be_had_alone():
    async def body(it):
        one = await it.answer([10, 9], **SAMPLED)
        answer = await it.answer([10, 9], **SAMPLED, n=3)
        finals = [sample[-1].finish for sample in by_sample(answer.responses)]
        assert len(answer.finals) == len(finals) == 3  # one each, and each is the last
        seeds = [finish.seed for finish in finals]
        assert seeds[0] == 7 and len(set(seeds)) == 3 and max(seeds) < 2**53
        samples = ids_of(answer.responses)
        assert samples == [expected(seed, 9) for seed in seeds]
        assert samples[0] == one.ids and len(set(map(tuple, samples))) == 3
        for seed, ids in zip(seeds, samples, strict=True):
            assert (await it.answer([10, 9], temperature=1.0, seed=seed)).ids == ids
        again = await it.answer([10, 9], **SAMPLED, n=2)
        assert ids_of(again.responses) == samples[:2]
        stats = [sample[-1].speculation for sample in by_sample(answer.responses)]
        assert [one.emitted for one in stats] == [10] * 3

    on_server(body, FakeEngine(THREE))


def test_unseeded_samples_are_fresh_every_time():
    async def body(it):
        answers = [await it.answer([10, 12], temperature=1.0, n=3) for _ in range(20)]
        samples = [tuple(ids) for answer in answers for ids in ids_of(answer.responses)]
        assert len(set(samples)) == 60

    on_server(body, FakeEngine(THREE))


def test_samples_wait_for_slots_that_others_have():
    async def body(it):
        endless = it.client.generate(make_request([10], max_new_tokens=100, draft_length=0))
        await anext(endless)
        for _ in range(5):
            answer = await it.answer([10, 9], **SAMPLED, n=3)
            assert all(len(ids) == 10 for ids in ids_of(answer.responses))
        await endless.aclose()
        load = await it.until_idle()
        assert (load.accepted, load.finished, load.cancelled) == (16, 15, 1)

    on_server(body, FakeEngine(THREE, step_seconds=0.005))


def test_stop_and_end_id_end_their_own_sample():
    async def body(it):
        answer = await it.answer([10], **SAMPLED, n=3, stop=["w22"], eos_ids=[25],
                                 max_new_tokens=40)
        for sample in by_sample(answer.responses):
            finish = sample[-1].finish
            full = [sampled_id(finish.seed, position) for position in range(40)]
            end = min(full.index(22), full.index(25)) + 1
            assert [token.id for r in sample for token in r.tokens] == full[:end]
            assert "w22" not in "".join(r.text for r in sample)
        assert len({len(ids) for ids in ids_of(answer.responses)}) > 1

    on_server(body, FakeEngine(THREE))


def test_client_that_goes_away_and_a_deadline_end_all_samples():
    async def body(it):
        request = dict(source=[10], n=3, max_new_tokens=100, draft_length=0)
        for _ in range(3):
            stream = it.client.generate(make_request(**request))
            await anext(stream)
            await stream.aclose()
        load = await it.until_idle()
        assert (load.accepted, load.cancelled) == (9, 9)
        # Two requests: of the second, all samples wait.
        calls = [it.answer(**request, timeout=0.3) for _ in range(2)]
        for code, _ in await asyncio.gather(*map(status_of, calls)):
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        load = await it.until_idle()
        assert (load.accepted, load.cancelled, load.finished) == (15, 15, 0)

    on_server(body, FakeEngine(THREE, step_seconds=0.02))


def test_all_samples_fit_into_the_queue_or_none():
    async def body(it):
        running = [it.client.generate(make_request([10], max_new_tokens=100, draft_length=0))
                   for _ in range(3)]
        for stream in running:
            await anext(stream)
        code, message = await status_of(it.answer([10, 2], n=3))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "0 requests wait, 3 more came, the limit is 2" in message
        waiting = asyncio.ensure_future(it.answer([10, 2], n=2))
        while (load := (await it.client.get_model()).load).queued < 2:
            await asyncio.sleep(0.01)
        assert (load.refused, load.queued_tokens) == (3, 2 * (3 + 100))
        for stream in running:
            await stream.aclose()
        assert ids_of((await waiting).responses) == [[11, 12, 1]] * 2

    on_server(body, FakeEngine(THREE, step_seconds=0.02), queue_limit=2)


def test_queue_has_an_end_in_tokens():
    async def body(it):
        running = it.client.generate(make_request([10], max_new_tokens=100, draft_length=0))
        await anext(running)
        waiting = asyncio.ensure_future(it.answer([10, 2], max_new_tokens=17))
        while (await it.client.get_model()).load.queued_tokens < 20:
            await asyncio.sleep(0.01)
        code, message = await status_of(it.answer([10, 2], max_new_tokens=28))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "51 tokens would wait, the limit is 50" in message
        assert (await it.client.get_model()).limits.queue_tokens == 50
        await running.aclose()
        assert (await waiting).ids == [11, 12, 1]

    on_server(body, FakeEngine(dataclasses.replace(CONFIG, slots=1), step_seconds=0.02),
              queue_tokens=50)


@pytest.mark.parametrize("source, message", [
    ([13, 9], "non-finite logits"), ([17, 9], "does not like 17")])
def test_sample_that_fails_ends_its_siblings_and_nobody_else(source, message):
    async def body(it):
        neighbour = asyncio.ensure_future(it.answer([50, 30], draft_length=0))
        for _ in range(4):
            code, said = await status_of(it.answer(source, n=3, draft_length=0))
            assert code is grpc.StatusCode.INTERNAL and message in said
        assert (await neighbour).ids == [*range(51, 81), 1]
        load = await it.until_idle()
        assert (load.failed, load.finished, load.cancelled) == (12, 1, 0)

    on_server(body, FakeEngine(THREE, step_seconds=0.01))


def test_higher_priorities_leave_the_queue_first_and_equal_ones_in_order_of_arrival():
    async def body(it):
        running = it.client.generate(make_request([10], max_new_tokens=100, draft_length=0))
        await anext(running)
        order: list[int] = []

        async def one(number: int, priority: int) -> None:
            await it.answer([10, 2], priority=priority)
            order.append(number)

        tasks = []
        for number, priority in enumerate((0, -1, 5, 0, 5)):
            tasks.append(asyncio.ensure_future(one(number, priority)))
            while (await it.client.get_model()).load.queued <= number:
                await asyncio.sleep(0.01)
        await running.aclose()
        await asyncio.gather(*tasks)
        assert order == [2, 4, 0, 3, 1]

    on_server(body, FakeEngine(dataclasses.replace(CONFIG, slots=1), step_seconds=0.02))


def test_low_priority_is_overtaken_for_a_limited_time():
    """By rank: whoever came 10 seconds earlier for each level goes first."""
    def rank(priority: int, now: float) -> float:
        request = Request(request_id="", source=(1,), sampling=None, seed=0, max_new_tokens=1,
                          eos_ids=(), draft_length=0, priority=priority)
        return Ticket(request, 0, None, OutputText(None, ()), now).rank

    assert rank(3, 99.0) < rank(0, 99.0 - 2.9 * PRIORITY_SECONDS)
    assert rank(3, 99.0) > rank(0, 99.0 - 3.1 * PRIORITY_SECONDS)


# ---- from Python and from a shell ------------------------------------------------


def test_answers_hold_their_samples_in_order():
    engine = BatchEngine(FakeEngine(THREE), FakeVocabulary(), eos_id=1)
    engine.start()
    try:
        answers = list(engine.generate([[10, 2 + k % 7] for k in range(40)], temperature=1.0,
                                       seed=3, n=3))
        single = list(engine.generate([[10, 2 + k % 7] for k in range(40)], temperature=1.0,
                                      seed=3))
    finally:
        engine.stop()
    for number, (answer, alone) in enumerate(zip(answers, single, strict=True)):
        assert answer.token_ids == alone.token_ids and not alone.others
        seeds = [one.request.seed for one in (answer, *answer.others)]
        assert len(set(seeds)) == 3 and seeds[0] == batch_engine.line_seed(3, number + 1)
        assert [list(one.token_ids) for one in (answer, *answer.others)] == [
            expected(seed, 2 + number % 7) for seed in seeds]


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Runs ``tpuspec batch`` on lines; gives exit code, output lines and error records."""
    batch_child.install(monkeypatch.setattr, tmp_path)

    def run(lines: list, *flags: str, output: str = "out.jsonl"):
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code = batch_child.run("--input", str(source), "--output", str(tmp_path / output), *flags)
        errors = tmp_path / "out.errors.jsonl"
        return (code, (tmp_path / output).read_text().splitlines(),
                [json.loads(line) for line in errors.read_text().splitlines()]
                if errors.exists() else [])

    return run


def test_lines_of_a_batch_job_have_their_samples(job, capsys):
    lines = [{"id": "a", "token_ids": [10, 3], "seed": 5}, {"token_ids": [10, 2], "n": 1},
             {"id": "c", "input": "zero", "max_new_tokens": 2, "n": 2, "target": "one two"}]
    code, out, errors = job(lines, "--n", "3", "--temperature", "1", "--ids", "--json")
    assert (code, errors) == (0, [])
    first, second, third = map(json.loads, out)
    assert list(first) == ["id", "samples"] and first["id"] == "a"
    assert [sample["token_ids"] for sample in first["samples"]] == [
        expected(sample["seed"], 3) for sample in first["samples"]]
    assert first["samples"][0]["seed"] == 5 and len(first["samples"]) == 3
    assert "samples" not in second and len(second["token_ids"]) == 3
    assert len(third["samples"]) == 2
    summary = json.loads(capsys.readouterr().out)
    assert summary["new_tokens"] == 3 * 4 + 3 + 2 * 2
    assert summary["finish_reasons"] == {"eos": 4, "length": 2}
    assert summary["scores"]["lines"] == 1


def test_text_output_has_no_place_for_samples(job):
    lines = [{"input": "zero", "max_new_tokens": 1}, {"input": "one", "n": 2}]
    code, out, errors = job(lines, output="out.txt")
    assert (code, out) == (1, ["one", ""])
    assert "line 2: n must be 1 with an output of text, got 2" in errors[0]["error"]["message"]


def test_job_is_not_taken_up_with_another_sampler(job, tmp_path):
    lines = [{"input": "zero", "max_new_tokens": 1}]
    assert job(lines)[0] == 0
    document = tmp_path / "out.jsonl.job" / "job.json"
    assert json.loads(document.read_text())["settings"]["sampler"] == "rejection"
    with pytest.raises(ValueError, match="sampler was 'rejection', now 'coupled'"):
        job(lines, "--sampler", "coupled")


def test_samples_on_the_command_line(fake_models, capsys):
    def run(*flags: str) -> list[str]:
        args = make_parser().parse_args(["generate", "--temperature", "1", "--seed", "4",
                                         "--max_new_tokens", "6", "--ignore_eos", *flags])
        assert generate.run(args) == 0
        return capsys.readouterr().out.splitlines()

    first, second = map(json.loads, run("--n", "5", "--json", "zero", "one"))
    assert [list(record) for record in (first, second)] == [["id", "samples"]] * 2
    for record in (first, second):
        assert [sample["token_ids"] for sample in record["samples"]] == [
            expected(sample["seed"], 6)[:-1] for sample in record["samples"]]
        assert len({sample["seed"] for sample in record["samples"]}) == 5
    lines = run("--n", "2", "zero", "one")
    assert lines[:2] == [sample["text"] for sample in first["samples"][:2]]
    assert len(lines) == 4
    assert run("--n", "2", "zero") == lines[:2]


def inference_request(ids: list[int], lenience: float) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="count")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[len(ids)],
                       contents=oip.InferTensorContents(int_contents=ids))
    request.parameters["lenience"].double_param = lenience
    return request


def test_lenient_outputs_say_that_they_are_not_exact(fake_models, capsys):
    for flags, marked in ((["--lenience", "0.5"], True), ([], False)):
        args = make_parser().parse_args(["generate", "--json", "--max_new_tokens", "2", *flags,
                                         "zero"])
        assert generate.run(args) == 0
        assert json.loads(capsys.readouterr().out).get("inexact", False) is marked

    async def body(it):
        for lenience in (1.0, 0.3):
            answer = await it.answer([10, 3], lenience=lenience)
            assert answer.finish.inexact is (lenience < 1)
            request = inference_request([10, 3], lenience)
            async with grpc.aio.insecure_channel(it.address) as channel:
                reply = await GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert ("inexact" in reply.parameters) is (lenience < 1)
        assert (await it.client.get_model()).sampler == "rejection"

    on_server(body)


# ---- the stream ------------------------------------------------------------------


def test_full_buffer_merges_chunks_of_one_sample_only():
    def chunk(index: int, number: int) -> TokenChunk:
        return TokenChunk(tokens=(Token(number, Origin.PLAIN, ""),), index=index,
                          steps=SpeculationStats(steps=1, emitted=1),
                          stats=SpeculationStats(steps=number, emitted=number))

    async def main():
        stream = TokenStream(samples=3)
        for number in range(400):
            stream.put(chunk(number % 3 if number < 300 else 2, number))
        found = collections.defaultdict(list)
        chunks = 0
        while stream._chunks:
            one = await anext(stream)
            found[one.index] += [token.id for token in one.tokens]
            chunks += 1
        return found, chunks

    found, chunks = asyncio.run(main())
    assert found[0] == list(range(0, 300, 3)) and found[1] == list(range(1, 300, 3))
    assert found[2] == [*range(2, 300, 3), *range(300, 400)]
    assert chunks < 20
