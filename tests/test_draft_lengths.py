"""The choice of draft lengths, against simulated requests of known acceptance.

No clock and no model: a simulated step takes the time of a table and accepts drafts by
coins, so that the best fixed draft length is known in closed form.
"""

import itertools

import numpy as np
import pytest

from tpuspec.draft_lengths import PLAIN, Acceptance, DraftLengths, Sources, Step

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
            step = self.choice.choose([drafting for drafting, _ in slots])
            length = step.length
            self.lengths.append(length)
            elapsed += self.real[length]
            self.choice.timed(step, self.real[length])
            for drafting, alphas in slots:
                kept = self.rng.random(length) < alphas[:length]
                accepted = sum(itertools.takewhile(bool, kept))
                examined = accepted + (accepted < length)
                self.choice.record("", drafting, accepted=accepted, examined=examined)
                tokens += accepted + 1
        return tokens / elapsed


def test_the_sum_over_all_requests_decides():
    """One whose drafts are refused asks for short steps, and takes part in long ones."""
    for alphas in ([HIGH, NONE], [HIGH, NONE, NONE, NONE], [LOW, FIRST_ONLY, NONE], [NONE] * 4):
        simulation = Simulation(CPU)
        slots = [(simulation.enter(), one) for one in alphas]
        simulation.run(slots, 200)
        reached = simulation.run(slots, 1500)
        rates = [closed_form(one, CPU) for one in alphas]
        best = max(sum(rate[length] for rate in rates) for length in LADDER)
        assert reached > 0.95 * best
    crowd = [(simulation.enter(), HIGH) for _ in range(4)]  # drafting pays for these alone
    simulation.run([*slots, *crowd], 400)
    assert np.mean(np.array(simulation.lengths[-200:]) >= 2) > 0.9


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
        choice.timed(Step(3), 2 * CPU[3])
    assert choice.step_ms() == pytest.approx({Step(n): 2 * ms for n, ms in CPU.items()})
    for _ in range(20):
        choice.timed(PLAIN, CPU[0])
    assert choice.step_ms()[PLAIN] == CPU[0] and choice.step_ms()[Step(3)] == 2 * CPU[3]


def test_newcomers_begin_with_what_their_kind_did():
    choice = DraftLengths(CPU)
    for kind, accepted in (("easy", 7), ("hard", 0)):
        for _ in range(20):
            old = choice.newcomer(kind, limit=7)
            for _ in range(10):
                choice.record(kind, old, accepted=accepted, examined=min(accepted + 1, 7))
    assert choice.choose([choice.newcomer("easy", limit=7)]) == Step(7)
    assert choice.choose([choice.newcomer("hard", limit=7)]) == PLAIN
    for number in range(300):  # labels are the clients': no more than some are kept
        choice.newcomer(f"kind {number}", limit=7)
    assert len(choice._kinds) == 256
    choice.record("easy", choice.newcomer("other", limit=7), accepted=0, examined=1)


def test_limits_and_fixed_lengths_are_kept():
    choice = DraftLengths(TPU)
    limited = choice.newcomer("", limit=2)
    assert limited.tokens(7)[2:] == [limited.tokens(7)[2]] * 6
    assert choice.choose([limited]) == Step(2)
    off = choice.newcomer("", limit=0)
    assert choice.choose([off]) == PLAIN
    assert choice.choose([off], shortest=5) == Step(5)


def test_a_ladder_of_plain_decoding_alone():
    choice = DraftLengths({0: 3.0})
    assert [choice.choose([choice.newcomer("", limit=0)]) for _ in range(600)] == [PLAIN] * 600


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


# ---- drafts of two sources ---------------------------------------------------

LOOK_UP = {length: 10 + 0.7 * length for length in LADDER if length}  # no draft passes


class TwoSources:
    """Requests with (acceptance of the model's drafts, how often a look-up finds any, and
    acceptance of these)."""

    def __init__(self, step_ms=CPU, real_ms=LOOK_UP, seed=0):
        self.choice = DraftLengths(step_ms, LOOK_UP)
        self.real = {Step(length): ms for length, ms in step_ms.items()} | {
            Step(length, looks_up=True): ms for length, ms in real_ms.items()}
        self.rng = np.random.default_rng(seed)
        self.steps: list[Step] = []

    def leading(self, alphas):
        return sum(itertools.takewhile(bool, self.rng.random(len(alphas)) < alphas))

    def run(self, slots, steps) -> float:
        """``slots``: (label, drafting, what it accepts). Returns tokens per millisecond."""
        tokens = elapsed = 0.0
        for _ in range(steps):
            running = [drafting for _, drafting, _ in slots]
            step = self.choice.choose(running)
            look_ups = self.choice.looking_up(running, step) if step.by_model else []
            self.steps.append(step)
            elapsed += self.real[step]
            self.choice.timed(step, self.real[step])
            for place, (label, drafting, (model, chance, looked_up)) in enumerate(slots):
                found = 7 if self.rng.random() < chance else 0
                right = self.leading(looked_up) if found else 0
                if step.looks_up or (step.by_model and look_ups[place] and found):
                    accepted = min(right, step.length)
                else:
                    accepted = min(self.leading(model), step.length)
                    self.choice.record(label, drafting, accepted=accepted,
                                       examined=accepted + (accepted < step.length))
                self.choice.record_look_up(label, drafting, found=found, new=accepted + 1,
                                           agreed=min(right, accepted + 1))
                tokens += accepted + 1
        return tokens / elapsed


def best_rate(slots, step_ms=CPU) -> float:
    """Of steps of one kind and length, each slot with the source that is better for it."""
    def tokens(alphas, length):
        return 1 + sum(np.cumprod(alphas[:length]))

    def of(length, looks_up):
        total = 0.0
        for _, _, (model, chance, looked_up) in slots:
            one = 1.0 if looks_up else tokens(model, length)
            total += one + chance * max(tokens(looked_up, length) - one, 0)
        return total

    return max([of(length, False) / ms for length, ms in step_ms.items()]
               + [of(length, True) / ms for length, ms in LOOK_UP.items()])


COPIES, SELDOM, PROSE = (LOW, 0.95, [0.95] * 7), (LOW, 0.3, [0.9] * 7), (HIGH, 0.6, [0.1] * 7)


@pytest.mark.parametrize("kinds", [
    [COPIES], [PROSE], [COPIES, COPIES, PROSE, PROSE], [SELDOM, SELDOM], [(NONE, 0.5, NONE)]],
    ids=["copies", "prose", "both", "seldom", "neither"])
def test_close_to_the_best_source_and_length(kinds):
    simulation = TwoSources()
    slots = [(str(kind[1]), simulation.choice.newcomer(str(kind[1]), 7), kind) for kind in kinds]
    simulation.run(slots, 200)
    assert simulation.run(slots, 2000) > 0.93 * best_rate(slots)


def test_each_request_takes_the_source_that_is_better_for_it():
    simulation = TwoSources()
    slots = [(name, simulation.choice.newcomer(name, 7), kind)
             for name, kind in (("copies", COPIES), ("prose", PROSE))]
    simulation.run(slots, 400)
    running = [drafting for _, drafting, _ in slots]
    chosen = [simulation.choice.looking_up(running, Step(5)) for _ in range(64)]
    assert [True, False] in chosen and [False, False] in chosen  # the draft stays known
    assert [False, True] not in chosen and [True, True] not in chosen
    fixed = simulation.choice.newcomer("copies", 7, chosen=False)
    assert not any(simulation.choice.looking_up([fixed], Step(5))[0] for _ in range(32))


def test_the_draft_model_is_tried_again_where_look_ups_reign():
    simulation = TwoSources()
    drafting = simulation.choice.newcomer("", 7)
    simulation.run([("", drafting, COPIES)], 600)
    assert np.mean([step.looks_up for step in simulation.steps[-300:]]) > 0.85
    simulation.run([("", drafting, PROSE)], 1200)  # another part of the text
    assert np.mean([step.by_model for step in simulation.steps[-300:]]) > 0.85


def test_look_ups_that_are_slower_than_they_seemed_are_given_up():
    simulation = TwoSources(real_ms={length: 5 * ms for length, ms in LOOK_UP.items()})
    slots = [("", simulation.choice.newcomer("", 7), (NONE, 0.9, HIGH))]
    simulation.run(slots, 200)
    assert simulation.run(slots, 2000) > 0.95 / CPU[0]


def test_a_named_length_is_the_draft_models_where_there_is_one():
    beside, alone = DraftLengths(CPU, LOOK_UP), DraftLengths({0: 10.0}, LOOK_UP)
    for choice, looks_up in ((beside, False), (alone, True)):
        named = choice.newcomer("", 7, chosen=False)
        for _ in range(50):
            choice.record_look_up("", named, found=7, agreed=8, new=8)
        assert choice.choose([named], shortest=3).looks_up is looks_up
    seen = Sources(7, memory=32)
    for _ in range(200):  # what ends before its block brings no more than it says
        seen.record_look_up(found=2, agreed=2, new=3)
    assert seen.look_ups.rates()[:3] == pytest.approx([1, 1, 0], abs=0.2)
