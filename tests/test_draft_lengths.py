"""The choice of draft lengths, against simulated requests of known acceptance.

No clock and no model: a simulated step takes the time of a table and accepts drafts by
coins, so that the best fixed draft length is known in closed form.
"""

import itertools

import numpy as np
import pytest

from tpuspec.draft_lengths import Acceptance, DraftLengths

LADDER = (0, 1, 2, 3, 5, 7)
TPU = {length: 10 + 0.2 * length for length in LADDER}  # ms: c = 0.02, no widening
CPU = {0: 10.0, 1: 14.0, 2: 16.0, 3: 18.0, 5: 23.0, 7: 29.0}
HIGH, LOW, NONE = [0.9] * 7, [0.4] * 7, [0.02] * 7
FIRST_ONLY = [0.8] + [0.2] * 6


def closed_form(alphas, step_ms):
    """Tokens per millisecond of every fixed draft length."""
    return {length: (1 + sum(np.cumprod(alphas[:length]))) / ms
            for length, ms in step_ms.items()}


class Simulation:
    """Requests in slots; ``real_ms`` is what steps really take."""

    def __init__(self, step_ms, real_ms=None, seed=0):
        self.choice = DraftLengths(step_ms)
        self.real = real_ms or step_ms
        self.rng = np.random.default_rng(seed)
        self.lengths: list[int] = []

    def enter(self, kind=""):
        return self.choice.newcomer(kind, limit=7)

    def run(self, slots, steps, kinds=None) -> float:
        """``slots``: (drafting, acceptance by place). Returns tokens per millisecond."""
        tokens = elapsed = 0.0
        for _ in range(steps):
            length = self.choice.choose([drafting for drafting, _ in slots])
            self.lengths.append(length)
            elapsed += self.real[length]
            self.choice.timed(length, self.real[length])
            for drafting, alphas in slots:
                kept = self.rng.random(length) < alphas[:length]
                accepted = sum(itertools.takewhile(bool, kept))
                examined = accepted + (accepted < length)
                self.choice.record("", drafting, accepted=accepted, examined=examined)
                tokens += accepted + 1
        return tokens / elapsed


@pytest.mark.parametrize("step_ms", [TPU, CPU], ids=["tpu", "cpu"])
@pytest.mark.parametrize("alphas", [HIGH, [0.7] * 7, LOW, FIRST_ONLY, NONE],
                         ids=["high", "middle", "low", "first only", "none"])
def test_close_to_the_best_fixed_draft_length(alphas, step_ms):
    simulation = Simulation(step_ms)
    slots = [(simulation.enter(), alphas) for _ in range(2)]
    simulation.run(slots, 100)
    reached = simulation.run(slots, 1500)
    assert reached > 0.95 * 2 * max(closed_form(alphas, step_ms).values())


def test_later_drafts_that_are_seldom_accepted_are_not_made():
    """Field case: acceptance by place decides, not one number for all places."""
    simulation = Simulation(CPU)
    slots = [(simulation.enter(), FIRST_ONLY)]
    simulation.run(slots, 1000)
    late = simulation.lengths[300:]
    assert np.mean([length in (1, 2) for length in late]) > 0.9
    mean = np.mean(FIRST_ONLY)  # as one number it would say not to draft at all
    assert max(closed_form([mean] * 7, CPU).items(), key=lambda item: item[1])[0] == 0


def test_drafting_stops_where_it_does_not_pay_and_resumes():
    simulation = Simulation(CPU)
    drafting = simulation.enter()
    simulation.run([(drafting, NONE)], 600)
    assert np.mean(np.array(simulation.lengths[-300:]) == 0) > 0.9
    simulation.run([(drafting, HIGH)], 600)  # the text became easy
    assert np.mean(np.array(simulation.lengths[-200:]) >= 5) > 0.9


@pytest.mark.parametrize("alphas", [HIGH, NONE], ids=["high", "none"])
def test_never_much_slower_than_plain_whatever_warm_up_said(alphas):
    """The watchdog: drafting steps that take five times what was timed at warm-up."""
    real = {length: ms * (5 if length else 1) for length, ms in CPU.items()}
    simulation = Simulation(CPU, real)
    slots = [(simulation.enter(), alphas) for _ in range(2)]
    simulation.run(slots, 200)
    assert simulation.run(slots, 2000) > 0.95 * 2 / real[0]


def test_times_of_a_slower_machine_scale_together():
    choice = DraftLengths(CPU)
    for _ in range(10):
        choice.timed(3, 2 * CPU[3])
    assert choice.step_ms() == pytest.approx({n: 2 * ms for n, ms in CPU.items()})
    for _ in range(20):
        choice.timed(0, CPU[0])
    assert choice.step_ms()[0] == CPU[0] and choice.step_ms()[3] == 2 * CPU[3]


def test_newcomers_begin_with_what_their_kind_did():
    choice = DraftLengths(CPU)
    for kind, accepted in (("easy", 7), ("hard", 0)):
        for _ in range(20):
            old = choice.newcomer(kind, limit=7)
            for _ in range(10):
                choice.record(kind, old, accepted=accepted, examined=min(accepted + 1, 7))
    assert choice.choose([choice.newcomer("easy", limit=7)]) == 7
    assert choice.choose([choice.newcomer("hard", limit=7)]) == 0
    for number in range(300):  # labels are the clients': no more than some are kept
        choice.newcomer(f"kind {number}", limit=7)
    assert len(choice._kinds) == 256
    choice.record("easy", choice.newcomer("other", limit=7), accepted=0, examined=1)


def test_limits_and_fixed_lengths_are_kept():
    choice = DraftLengths(TPU)
    limited = choice.newcomer("", limit=2)
    assert limited.tokens(7)[2:] == [limited.tokens(7)[2]] * 6
    assert choice.choose([limited]) == 2
    off = choice.newcomer("", limit=0)
    assert choice.choose([off]) == 0
    assert choice.choose([off], shortest=5) == 5


def test_a_ladder_of_plain_decoding_alone():
    choice = DraftLengths({0: 3.0})
    assert [choice.choose([choice.newcomer("", limit=0)]) for _ in range(600)] == [0] * 600


def test_acceptance_by_place_follows_what_was_seen_and_forgets():
    seen = Acceptance(3, memory=256)
    assert seen.rates() == pytest.approx([0.7] * 3)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        first, second = rng.random(2) < (0.8, 0.3)
        seen.record(int(first) + int(first and second), 1 + int(first))
    assert seen.rates() == pytest.approx([0.8, 0.3, 0.3], abs=0.1)
    for _ in range(3000):
        seen.record(1, 1)  # the second place is never tried again
    assert seen.rates()[1] == pytest.approx(seen.rates()[0], abs=0.01)
