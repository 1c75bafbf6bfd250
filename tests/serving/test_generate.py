"""Whole requests over real gRPC: what comes out, chunk by chunk."""

import asyncio
import dataclasses
import itertools
import random

import pytest
from fake_engine import CONFIG, FakeEngine, sampled_id
from harness import on_server

from tpuspec.protos import generation_pb2 as pb


def test_hand_computed_output_arrives_step_by_step():
    async def body(it):
        answer = await it.answer([10, 9])
        assert [[t.id for t in r.tokens] for r in answer.responses] == [
            [11, 12, 13, 14], [15, 16, 17, 18], [19, 1]]
        assert answer.origins == "aaabaaabaa"
        assert answer.text == "w11 w12 w13 w14 w15 w16 w17 w18 w19"
        assert answer.reason == "eos"
        assert (answer.finish.source_tokens, answer.finish.new_tokens) == (3, 10)
        assert answer.finish.decode_tokens == 6
        timings = answer.finish.timings
        assert 0 <= timings.queue_seconds <= timings.first_token_seconds <= timings.total_seconds
        assert timings.first_token_seconds + timings.decode_seconds == pytest.approx(
            timings.total_seconds)

    on_server(body)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accepts", [None, 0, 1])
def test_end_id_in_the_middle_of_a_block_ends_the_output(overlap, accepts):
    async def body(it):
        for count in range(12):
            answers = await asyncio.gather(*(
                it.answer([100 * row, count + row, 1], temperature=temperature, seed=row)
                for row, temperature in itertools.product((1, 2), (0.0, 1.0))))
            for answer, (row, temperature) in zip(
                    answers, itertools.product((1, 2), (0.0, 1.0)), strict=True):
                length = count + row
                counted = [100 * row + 1 + n for n in range(length)]
                sampled = [sampled_id(row, n) for n in range(length)]
                assert answer.ids == [*(sampled if temperature else counted), 1]
                assert answer.reason == "eos"
                assert answer.finish.new_tokens == length + 1

    on_server(body, FakeEngine(accepts=accepts), overlap=overlap)


@pytest.mark.parametrize("count, limit, ids, reason", [
    (2, 5, [11, 12, 1], "eos"), (4, 5, [11, 12, 13, 14, 1], "eos"),
    (5, 5, [11, 12, 13, 14, 15], "length")])
def test_length_limit_is_not_tested_before_the_end_id(count, limit, ids, reason):
    async def body(it):
        answer = await it.answer([10, count], max_new_tokens=limit, draft_length=7)
        assert (answer.ids, answer.reason) == (ids, reason)

    on_server(body)


@pytest.mark.parametrize("stop, limit, text, count, reason", [
    ("three", 5, "one two ", 3, "stop"), ("five", 5, "one two three four ", 5, "stop"),
    ("six", 5, "one two three four five", 5, "length"),
    ("one", 1, "", 1, "stop"), ("two", 1, "one", 1, "length")])
def test_length_limit_is_not_tested_before_a_stop_string(stop, limit, text, count, reason):
    async def body(it):
        answer = await it.answer("zero", stop=[stop], max_new_tokens=limit, draft_length=7)
        assert (answer.text, answer.reason) == (text, reason)
        assert answer.ids == list(range(31, 31 + count))
        assert answer.finish.new_tokens == count
        assert answer.finish.stop == (stop if reason == "stop" else "")

    on_server(body)


def test_stop_string_before_the_end_id_in_one_block_wins():
    async def body(it):
        answer = await it.answer([30, 6], stop=["three"], draft_length=7)
        assert (answer.text, answer.ids, answer.reason) == ("one two ", [31, 32, 33], "stop")
        await it.until_idle()

    on_server(body)


def test_beginning_of_a_stop_string_is_never_streamed():
    async def body(it):
        for length in (0, 1, 3):
            answer = await it.answer("zero", stop=["three four"], draft_length=length)
            assert answer.text == "one two "
            assert answer.reason == "stop"
            answer = await it.answer("zero", stop=["three fish"], max_new_tokens=4,
                                     draft_length=length)
            assert answer.text == "one two three four"
            answer = await it.answer("zero", stop=["four five six seven eight nine"],
                                     max_new_tokens=6, draft_length=length)
            assert answer.text == "one two three four five six"
            assert answer.reason == "length"

    on_server(body)


def test_every_answer_has_exactly_one_final_message_with_all_tokens_before_or_in_it():
    async def body(it):
        cases = [dict(source=[10], max_new_tokens=1), dict(source=[10, 0]),
                 dict(source=[10, 3]), dict(source=[10, 4]), dict(source="zero", stop=["four"]),
                 dict(source=[10], max_new_tokens=100)]
        for case in cases:
            answer = await it.answer(**case)
            assert answer.finish.new_tokens == len(answer.ids) > 0
            assert answer.finish.new_tokens == answer.responses[-1].speculation.emitted

    on_server(body)


def test_slow_reader_misses_nothing():
    async def body(it):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10]), max_new_tokens=60)
        ids, finals = [], 0
        async for response in it.client.generate(request):
            ids += [token.id for token in response.tokens]
            finals += response.HasField("finish")
            await asyncio.sleep(0.05)
        assert (ids, finals) == (list(range(11, 71)), 1)

    on_server(body)


@pytest.mark.parametrize("draft_length", range(8))
def test_budget_never_goes_below_zero_near_the_limit(draft_length):
    config = dataclasses.replace(CONFIG, max_target_length=20)

    async def body(it):
        both = [it.answer([10], max_new_tokens=limit, draft_length=draft_length)
                for limit in (19, 20)]
        answers = await asyncio.gather(*both)
        assert [len(answer.ids) for answer in answers] == [19, 20]
        assert [answer.reason for answer in answers] == ["length", "length"]
        unlimited = await it.answer([10], draft_length=draft_length)
        assert len(unlimited.ids) == 20  # the server's limit, when a request names none
        assert (await it.answer([10, 2], draft_length=draft_length)).ids == [11, 12, 1]

    on_server(body, FakeEngine(config))


@pytest.mark.parametrize("draft_length", [0, 1, 3, 7])
def test_no_end_id_or_several(draft_length):
    async def body(it):
        common = dict(draft_length=draft_length, max_new_tokens=12)
        endless = await it.answer([10, 4], ignore_eos=True, **common)
        assert endless.ids == [11, 12, 13, 14, 1, *range(16, 23)]
        assert endless.reason == "length"
        listed = await it.answer([10, 8], eos_ids=[1, 15], **common)
        assert listed.ids == [11, 12, 13, 14, 15]
        assert (listed.reason, listed.text) == ("eos", "w11 w12 w13 w14")
        other = await it.answer([10, 2], eos_ids=[15], **common)
        assert other.ids == [11, 12, 1, 14, 15]

    on_server(body)


def test_draft_lengths_between_and_beside_the_compiled_ones():
    async def body(it):
        answers = await asyncio.gather(*(
            it.answer([10 * n, 20], draft_length=n) for n in range(1, 8)))
        for n, answer in enumerate(answers, 1):
            assert answer.ids == [*range(10 * n + 1, 10 * n + 21), 1]
            assert answer.responses[0].drafted == n
            assert answer.finish.draft_length == n

    on_server(body)


def test_plain_decoding_is_told_apart():
    async def body(it):
        answer = await it.answer([10, 3], draft_length=0)
        assert answer.origins == "pppp"
        assert not answer.responses[-1].speculation.HasField("alpha")
        assert not answer.finish.HasField("predicted_speedup")

    on_server(body)


def test_tokens_of_one_request_never_reach_another_reader():
    rng = random.Random(0)
    config = dataclasses.replace(CONFIG, slots=4)

    async def body(it):
        async def one(number: int) -> None:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[30 * number + 10, 25]))
            ids = []
            stream = it.client.generate(request)
            async for response in stream:
                ids += [token.id for token in response.tokens]
                if number % 5 == 0 and len(ids) > 8:
                    await stream.aclose()
                    break
                if number % 3 == 0:
                    await asyncio.sleep(rng.random() * 0.02)
            whole = [*range(30 * number + 11, 30 * number + 36), 1]
            assert ids == (whole[:len(ids)] if number % 5 == 0 else whole)

        await asyncio.gather(*(one(number) for number in range(50)))
        await it.until_idle()

    on_server(body, FakeEngine(config, accepts=1, step_seconds=0.001))


def test_same_seed_gives_the_same_ids_whatever_the_neighbours():
    async def ids(it, **parameters):
        return (await it.answer([10, 12], temperature=1.0, **parameters)).ids

    async def body(it):
        alone = await ids(it, seed=42)
        crowd = [ids(it, seed=n) for n in range(3)] + [ids(it) for _ in range(3)]
        among, greedy, *_ = await asyncio.gather(ids(it, seed=42), it.answer([10, 5]), *crowd)
        assert among == alone == [*(sampled_id(42, n) for n in range(12)), 1]
        assert greedy.ids == [*range(11, 16), 1]

    on_server(body)
    on_server(body)  # and after a restart


def test_requests_without_a_seed_differ_and_their_echoed_seeds_repeat_them():
    async def body(it):
        answers = [await it.answer([10, 16], temperature=1.0) for _ in range(30)]
        assert len({tuple(answer.ids) for answer in answers}) == 30
        seed = answers[7].finish.seed
        again = await it.answer([10, 16], temperature=1.0, seed=seed)
        assert again.ids == answers[7].ids and again.finish.seed == seed
        largest = await it.answer([10, 16], temperature=1.0, seed=2**64 - 1)
        assert largest.finish.seed == 2**64 - 1

    on_server(body)


def test_request_id_is_echoed_or_made():
    async def body(it):
        named = await it.answer([10, 9], request_id="mine")
        assert {response.request_id for response in named.responses} == {"mine"}
        made = [await it.answer([10, 1]) for _ in range(2)]
        assert made[0].responses[0].request_id != made[1].responses[0].request_id != ""

    on_server(body)


@pytest.mark.parametrize("draft_length", [0, 3])
def test_logprobs_come_with_their_own_token_and_only_where_asked_for(draft_length):
    async def body(it):
        answers = await asyncio.gather(*(
            it.answer([10, 9], draft_length=draft_length, logprobs=count)
            for count in (None, 0, 2)), it.answer("zero", stop=["four"], logprobs=1))
        for answer, count in zip(answers, (None, 0, 2, 1), strict=True):
            tokens = [token for r in answer.responses for token in r.tokens]
            assert len(tokens) == answer.finish.new_tokens
            for place, token in enumerate(tokens):
                assert token.HasField("logprob") == (count is not None)
                if count is not None:
                    assert token.logprob == -place / 8
                assert [(top.id, top.logprob) for top in token.top_logprobs] == [
                    (token.id + n, -place / 8 - n) for n in range(count or 0)]

    on_server(body)


def test_decoder_prompt_is_not_sent_back_and_its_steps_send_nothing():
    async def body(it):
        for length, origins in ((0, "pppp"), (3, "paaa")):
            answer = await it.answer("zero", decoder_prompt="seven eight nine", draft_length=length,
                                     max_new_tokens=4)
            assert (answer.ids, answer.text) == ([31, 32, 33, 34], " one two three four")
            assert all(response.tokens for response in answer.responses)
            assert answer.origins == origins
            assert answer.finish.new_tokens == 4

    on_server(body)
