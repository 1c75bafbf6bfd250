"""Acceptance figures that mean what the proto says, and count everything once."""

import dataclasses

import numpy as np
import pytest
from fake_engine import CONFIG, COST, FakeEngine
from harness import on_server

from tpuspec import theory
from tpuspec.decode_state import StepOutput
from tpuspec.protos import generation_pb2 as pb
from tpuspec.sampling import SamplingParams
from tpuspec.serving.output_text import OutputText
from tpuspec.serving.request import Request
from tpuspec.serving.ticket import Ticket
from tpuspec.token_logprobs import TokenLogprobs


def counts(s: pb.Speculation) -> tuple[int, int, int, int, int]:
    return (s.target_runs, s.emitted, s.drafted, s.examined, s.accepted)


def test_drafts_cut_by_the_end_id_are_drafted_but_never_judged():
    async def body(it):
        answer = await it.answer([10, 9])  # [a a a b] [a a a b] [a a|.]
        s = answer.responses[-1].speculation
        assert counts(s) == (3, 10, 9, 8, 8)
        assert s.alpha == 1.0 and s.alpha_overlap == 1.0
        assert s.draft_acceptance_rate == pytest.approx(8 / 9)
        assert s.tokens_per_target_run == pytest.approx(10 / 3)
        assert s.c == 0.25
        assert [(r.drafted, r.accepted) for r in answer.responses] == [(3, 3), (3, 3), (3, 2)]
        finish = answer.finish
        assert finish.predicted_speedup == pytest.approx(theory.speedup(1.0, 3, 0.25, 1.25))
        assert finish.observed_speedup == pytest.approx(
            6 * 1e-3 * COST.step_ms[0] / finish.timings.decode_seconds)

    on_server(body)


def test_rejected_draft_is_judged_and_those_after_it_are_not():
    async def body(it):
        answer = await it.answer([10, 5])  # [a c] [a c] [a 1]
        assert answer.origins == "acacac"
        s = answer.responses[-1].speculation
        assert counts(s) == (3, 6, 9, 6, 3)
        assert s.alpha == 0.5

    on_server(body, FakeEngine(accepts=1))


def test_draft_that_is_always_wrong_gives_one_token_a_target_run():
    async def body(it):
        s = (await it.answer([10, 5])).responses[-1].speculation
        assert counts(s) == (6, 6, 18, 6, 0)
        assert s.HasField("alpha") and s.alpha == 0.0

    on_server(body, FakeEngine(accepts=0))


def test_prediction_uses_the_pass_that_was_run():
    """Draft length 2 runs in the program for 3."""
    async def body(it):
        finish = (await it.answer([10, 5], draft_length=2)).finish
        assert finish.predicted_speedup == pytest.approx(theory.speedup(1.0, 2, 0.25, 1.25))

    on_server(body)


def test_figures_that_are_not_known_are_absent():
    async def body(it):
        answer = await it.answer([10, 5])
        assert not answer.responses[-1].speculation.HasField("c")
        assert not answer.finish.HasField("predicted_speedup")
        assert not answer.finish.HasField("observed_speedup")
        assert not (await it.client.get_model()).HasField("cost")

    on_server(body, FakeEngine(cost=None))


def test_draft_lengths_that_are_chosen_have_no_number_and_no_prediction():
    async def body(it):
        limits = (await it.client.get_model()).limits
        assert not limits.HasField("default_draft_length")
        answer = await it.answer([10, 9], label="counting")
        assert answer.origins == "aaabaaabaa"
        assert not answer.finish.HasField("draft_length")
        assert not answer.finish.HasField("predicted_speedup")
        assert answer.finish.HasField("observed_speedup")
        named = (await it.answer([10, 9], draft_length=1)).finish
        assert named.draft_length == 1 and named.HasField("predicted_speedup")
        plain = (await it.answer([10, 9], draft_length=0)).finish
        assert plain.HasField("draft_length") and plain.draft_length == 0

    on_server(body, FakeEngine(dataclasses.replace(CONFIG, draft_length=None)))


def test_server_counts_every_request_once_cancelled_ones_included():
    async def body(it):
        totals = [0] * 5
        for _ in range(3):
            answer = await it.answer([10, 9])
            totals = [a + b for a, b in zip(totals, counts(answer.responses[-1].speculation),
                                            strict=True)]
        model = await it.client.get_model()
        assert list(counts(model.speculation)) == totals
        stream = it.client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10])))
        await anext(stream)
        await stream.aclose()
        load = await it.until_idle()
        assert (load.accepted, load.finished, load.cancelled, load.failed) == (4, 3, 1, 0)
        after = (await it.client.get_model()).speculation
        assert all(new >= old for new, old in zip(counts(after), totals, strict=True))
        assert after.emitted >= totals[1] + 4

    on_server(body, FakeEngine(step_seconds=0.01))


def test_model_tells_its_limits_and_costs():
    async def body(it):
        model = await it.client.get_model()
        assert (model.name, model.eos_id) == ("count", 1)
        limits = model.limits
        assert (limits.slots, limits.queue, limits.max_new_tokens) == (2, 64, 100)
        assert list(limits.source_buckets) == [8, 64]
        assert list(limits.draft_lengths) == [0, 1, 3, 7] and limits.default_draft_length == 3
        assert limits.vocabulary_size == 2000
        assert dict(model.cost.verify_widening) == {0: 1.0, 1: 1.05, 3: 1.25, 7: 1.5}
        assert dict(model.cost.step_ms) == COST.step_ms
        assert model.cost.c == 0.25

    on_server(body)


def test_drafts_beyond_a_stop_string_are_not_counted_as_accepted():
    """A block of four, all accepted, of which a stop string keeps the first token."""
    output = StepOutput(
        tokens=np.array([[10, 11, 12, 13]], np.int32), num_tokens=np.array([4]),
        drafted=np.array([3]), accepted=np.array([3]), examined=np.array([3]),
        finish=np.array([0]), overlap=np.array([2.4], np.float32),
        found=np.array([0]), agreed=np.array([0]),
        logprobs=TokenLogprobs(*(np.zeros((1, 4, 1)[:n], np.float32) for n in (2, 3, 3))))
    request = Request(request_id="", source=(1,), sampling=SamplingParams(), seed=0,
                      max_new_tokens=9, eos_ids=(), stop=("k",), draft_length=3)

    class Letters:
        def push(self, ids):
            return "".join(chr(97 + i) for i in ids)

        def flush(self):
            return ""

    ticket = Ticket(request, 0, None, OutputText(Letters(), request.stop), now=0.0)
    chunk = ticket.advance(output, 0, 1.0)
    assert (len(chunk.tokens), chunk.steps.accepted, chunk.steps.examined) == (1, 1, 1)
    assert chunk.steps.emitted == 1 and chunk.steps.overlap == pytest.approx(0.8)
