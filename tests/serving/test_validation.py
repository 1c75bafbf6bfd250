"""The door: every field out of bounds is refused with its name, its value and the bound."""

import asyncio
import dataclasses
import inspect
import math

import grpc
import pytest
from fake_engine import CONFIG, FakeVocabulary
from harness import field_of, on_server, status_of

from tpuspec.engine import Engine
from tpuspec.protos import generation_pb2 as pb
from tpuspec.sampling import SamplingParams
from tpuspec.serving.client import make_request
from tpuspec.serving.validation import Door

DOOR = Door(CONFIG, vocabulary_size=2000, eos_id=1, vocabulary=FakeVocabulary())
BARE_DOOR = Door(CONFIG, vocabulary_size=2000, eos_id=1, vocabulary=None)


@pytest.mark.parametrize("fields, message", [
    (dict(source=[]), "token_ids must have at least 1 id, got 0"),
    (dict(source=[5, 2000]), r"token_ids\[1\] must be in \[0, 1999\], got 2000"),
    (dict(source=[-1]), r"token_ids\[0\] must be in \[0, 1999\], got -1"),
    (dict(source=[5] * 64), "token_ids must have at most 64 tokens .* got 65"),
    (dict(source="one " * 64), "text must have at most 64 tokens .* got 65"),
    (dict(source="a" * (1 << 20) + "a"), "text must have 0 to 1048576 characters, got 1048577"),
    (dict(max_new_tokens=0), r"max_new_tokens must be in \[1, 100\], got 0"),
    (dict(max_new_tokens=-5), r"max_new_tokens must be in \[1, 100\], got -5"),
    (dict(max_new_tokens=101), r"max_new_tokens must be in \[1, 100\], got 101"),
    (dict(draft_length=-1), r"draft_length must be in \[0, 7\], got -1"),
    (dict(draft_length=8), r"draft_length must be in \[0, 7\], got 8"),
    (dict(temperature=-0.1), r"sampling.temperature must be in \[0.0, 100.0\], got -0.1"),
    (dict(temperature=101), r"sampling.temperature must be in \[0.0, 100.0\], got 101.0"),
    (dict(temperature=math.nan), "sampling.temperature must be finite, got nan"),
    (dict(temperature=math.inf), "sampling.temperature must be finite, got inf"),
    (dict(top_p=0.0), r"sampling.top_p must be in \(0, 1\], got 0.0"),
    (dict(top_p=1.5), r"sampling.top_p must be in \(0, 1\], got 1.5"),
    (dict(top_p=math.nan), "sampling.top_p must be finite, got nan"),
    (dict(top_k=-1), "sampling.top_k must be .*, got -1"),
    (dict(min_p=1.5), r"sampling.min_p must be in \[0.0, 1.0\], got 1.5"),
    (dict(min_p=math.nan), "sampling.min_p must be finite, got nan"),
    (dict(repetition_penalty=0), r"sampling.repetition_penalty must be in \[0.01, 100.0\], got 0"),
    (dict(repetition_penalty=math.inf), "sampling.repetition_penalty must be in .*, got inf"),
    (dict(presence_penalty=2.5), r"sampling.presence_penalty must be in \[-2.0, 2.0\], got 2.5"),
    (dict(frequency_penalty=math.nan), "sampling.frequency_penalty must be in .*, got nan"),
    (dict(logit_bias={5: 101}), r"sampling.logit_bias\[5\] must be in \[-100.0, 100.0\], got 101"),
    (dict(logit_bias={2000: 1}), r"sampling.logit_bias id must be in \[0, 1999\], got 2000"),
    (dict(banned_ids=[3, -1]), r"sampling.banned_ids\[1\] must be in \[0, 1999\], got -1"),
    (dict(allowed_ids=[2000]), r"sampling.allowed_ids\[0\] must be in \[0, 1999\], got 2000"),
    (dict(banned_ids=[3] * 2001), "sampling.banned_ids must have at most 2000 ids, got 2001"),
    (dict(banned_ids=range(2000)), "sampling.banned_ids must leave one of 2000 ids, got all"),
    (dict(banned_ids=[3, 4], allowed_ids=[3]), "sampling.allowed_ids must have an id that is not "
     "one of banned_ids, got 1 ids, all banned"),
    (dict(decoder_prompt=[5] * 100), "decoder_token_ids must have at most 99 tokens, which is 100 "
     r"less max_new_tokens \(or 1\), got 100"),
    (dict(decoder_prompt=[5] * 11, max_new_tokens=90), "decoder_token_ids must have at most 10 .* "
     "got 11"),
    (dict(decoder_prompt="one " * 100), "decoder_text must have at most 99 tokens, .* got 100"),
    (dict(decoder_prompt="a" * (1 << 20) + "a"), "decoder_text must have 0 to 1048576 characters"),
    (dict(decoder_prompt=[5, 2000]), r"decoder_token_ids\[1\] must be in \[0, 1999\], got 2000"),
    (dict(decoder_prompt=[5] * 90, min_new_tokens=11), r"min_new_tokens must be in \[0, 10\]"),
    (dict(logprobs=21), r"logprobs must be in \[0, 20\], got 21"),
    (dict(logprobs=-1), r"logprobs must be in \[0, 20\], got -1"),
    (dict(min_new_tokens=-1), r"min_new_tokens must be in \[0, 100\], got -1"),
    (dict(min_new_tokens=6, max_new_tokens=5), r"min_new_tokens must be in \[0, 5\], got 6"),
    (dict(min_new_tokens=1, allowed_ids=[1]), "min_new_tokens must be 0 where banned_ids and "
     "allowed_ids leave only end ids, got 1"),
    (dict(eos_ids=[2000]), r"eos_ids\[0\] must be in \[0, 1999\], got 2000"),
    (dict(eos_ids=[5] * 9), "eos_ids must have 0 to 8 ids, got 9"),
    (dict(eos_ids=[5], ignore_eos=True), r"eos_ids must be empty with ignore_eos, got 1 ids"),
    (dict(stop=["a", ""]), r"stop\[1\] must have 1 to 256 characters, got 0"),
    (dict(stop=["a" * 257]), r"stop\[0\] must have 1 to 256 characters, got 257"),
    (dict(stop=["a"] * 9), "stop must have 0 to 8 strings, got 9"),
    (dict(n=0), r"n must be in \[1, 2\], got 0"),
    (dict(n=3), r"n must be in \[1, 2\], got 3"),
    (dict(priority=101), r"priority must be in \[-100, 100\], got 101"),
    (dict(priority=-101), r"priority must be in \[-100, 100\], got -101"),
    (dict(lenience=0.0), r"sampling.lenience must be in \(0, 1\], got 0.0"),
    (dict(lenience=1.5), r"sampling.lenience must be in \(0, 1\], got 1.5"),
    (dict(lenience=math.nan), "sampling.lenience must be finite, got nan"),
    (dict(label="a" * 65), "label must have 0 to 64 characters, got 65"),
    (dict(request_id="a" * 257), "request_id must have 0 to 256 characters, got 257"),
])
def test_field_out_of_bounds_is_named_with_value_and_bound(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        DOOR.check(make_request(**{"source": "one", **fields}))
    field_of(str(caught.value).partition(" ")[0])  # which clients get as the violation's field


def test_request_without_a_source_is_refused():
    with pytest.raises(ValueError, match="source must be set: text or token_ids"):
        DOOR.check(pb.GenerateRequest())


@pytest.mark.parametrize("source, ids", [
    ("", (1,)), (" ", (1,)), ("\n\n", (1,)), ([1], (1,)), ([0, 0, 0], (0, 0, 0, 1)),
    ([5, 6], (5, 6, 1)), ([5, 6, 1], (5, 6, 1)), ([1, 1], (1, 1)),
    ("one " * 63, (31,) * 63 + (1,)), ([5] * 63, (5,) * 63 + (1,)), ([5] * 63 + [1],
                                                                    (5,) * 63 + (1,))])
def test_source_ends_with_one_end_id_and_may_be_that_alone(source, ids):
    assert DOOR.check(make_request(source)).source == ids


def test_defaults_are_greedy_and_the_servers_limits():
    request = DOOR.check(pb.GenerateRequest(text="one"))
    assert request.sampling.temperature == 0 and request.sampling.top_p == 1.0
    assert (request.max_new_tokens, request.draft_length, request.eos_ids) == (100, 3, (1,))
    assert DOOR.check(make_request("one", ignore_eos=True)).eos_ids == ()


def test_options_reach_the_request():
    request = DOOR.check(make_request(
        "one", min_p=0.25, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5,
        logit_bias={"7": 2.5, 9: -100}, banned_ids=[4], allowed_ids=[1, 5], min_new_tokens=3,
        logprobs=0))
    assert request.sampling == SamplingParams(
        min_p=0.25, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5,
        logit_bias={7: 2.5, 9: -100.0}, banned_ids=(4,), allowed_ids=(1, 5))
    assert (request.min_new_tokens, request.logprobs) == (3, 0)
    assert DOOR.check(make_request("one")).logprobs is None
    assert DOOR.check(make_request([5], allowed_ids=[1])).sampling.allowed_ids == (1,)


def test_every_option_of_the_engine_is_in_the_proto():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(
        pb.Sampling.DESCRIPTOR.fields_by_name)
    request = pb.GenerateRequest.DESCRIPTOR
    named = {*request.fields_by_name, *request.oneofs_by_name}
    taken = set(inspect.signature(Engine.insert).parameters)
    assert taken - named == {"self", "slot"}
    # What the engine never sees: it is for the way in and out.
    assert {*request.fields_by_name} - taken - {
        field.name for name in ("source", "decoder_prompt")
        for field in request.oneofs_by_name[name].fields} == {
        "request_id", "ignore_eos", "stop", "n", "priority"}


def test_lenience_has_no_meaning_where_nothing_is_accepted_by_chance():
    config = dataclasses.replace(CONFIG, sampler="coupled")
    door = Door(config, vocabulary_size=2000, eos_id=1, vocabulary=FakeVocabulary())
    assert door.check(make_request("one", lenience=1.0)).sampling.exact
    with pytest.raises(ValueError, match="sampling.lenience must be 1 with coupled .*, got 0.5"):
        door.check(make_request("one", lenience=0.5))
    assert not DOOR.check(make_request("one", lenience=0.5)).sampling.exact


def test_decoder_prompt_has_no_end_id_of_its_own_and_leaves_the_rest_for_new_tokens():
    for prompt, ids in (("one two", (31, 32)), ([31, 1, 32], (31, 1, 32)), ("", ()), ([], ())):
        request = DOOR.check(make_request("one", decoder_prompt=prompt))
        assert (request.decoder_prompt, request.max_new_tokens) == (ids, 100 - len(ids))
    request = DOOR.check(make_request("one", decoder_prompt="one two", max_new_tokens=98))
    assert request.max_new_tokens == 98


def test_model_without_a_vocabulary_takes_ids_only():
    assert BARE_DOOR.check(make_request([5])).source == (5, 1)
    with pytest.raises(ValueError, match="text needs a vocabulary"):
        BARE_DOOR.check(make_request("one"))
    assert BARE_DOOR.check(make_request([5], decoder_prompt=[7])).decoder_prompt == (7,)
    with pytest.raises(ValueError, match="decoder_text needs a vocabulary"):
        BARE_DOOR.check(make_request([5], decoder_prompt="one"))
    with pytest.raises(ValueError, match="stop must be empty: this model has no vocabulary"):
        BARE_DOOR.check(make_request([5], stop=["a"]))


def test_value_that_does_not_fit_its_field_is_refused_by_the_client():
    for fields in (dict(seed=-1), dict(seed=2**64), dict(max_new_tokens=2**31), dict(seed="x"),
                   dict(logit_bias=[5]), dict(logit_bias={"x": 1.0}), dict(banned_ids=["x"])):
        with pytest.raises(ValueError):
            make_request("one", **fields)


def test_bad_requests_end_with_invalid_argument_and_leave_neighbours_alone():
    bad = [dict(source=[]), dict(source=[5, 9999]), dict(source=[5] * 1000),
           dict(source="one " * 5000), dict(source=[5], max_new_tokens=0),
           dict(source=[5], temperature=math.nan), dict(source="one", stop=[""])]

    async def body(it):
        neighbour = asyncio.ensure_future(it.answer([10, 30]))
        for fields in bad:
            code, message = await status_of(it.answer(**fields))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, message
        for source, ids in (("", [2, 3, 4]), (" ", [2, 3, 4]), ([1], [2, 3, 4]), ([0, 0, 0], [1])):
            assert (await it.answer(source, max_new_tokens=3)).ids == ids
        assert (await neighbour).ids == [*range(11, 41), 1]
        load = await it.until_idle()
        assert load.accepted == load.finished == 5

    on_server(body)
