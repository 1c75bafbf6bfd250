"""How many tokens to draft in the next step, and by what, from what was accepted so far.

Eq. (5) of Leviathan et al. (2022) with what is known of the requests that run and of
this machine: acceptance by place in the block, since drafts after the first are often
accepted less, and times of whole steps. All slots share a step, so that there is one
draft length at a time: the one that gives most tokens a second over all of them. To this sum
a request whose drafts are refused adds one token, however long the step: where most are such,
or where longer steps take more time than their drafts are worth, the answer is 0 and all
decode plainly. Where it is not, the drafts of such a request cost no time, and stay.

Drafts come of the draft model or are looked up (see ``ngram_drafts``). Looked-up ones alone
make a shorter step; in a step of the draft model, each slot takes what it may expect more of.
How far a look-up would have been right shows in every step, whatever drafted: a token comes
with the target's probability, which is that of a sure draft's being accepted.

Host code without arrays: a choice for 8 requests takes some tenths of a millisecond, while
the step before it runs.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNKNOWN = 0.7  # acceptance of a first draft about which nothing is known
_WEIGHT = 4.0  # drafts that what is known beforehand counts for
_KINDS = 256  # labels remembered; the longest unused is forgotten
_TIMED = 7  # step times kept for each draft length
_TRUSTED = 3  # of them, before they stand for themselves
_PLAIN_EVERY = 128  # drafting steps after which a plain one is timed again
_PLAIN_SOON = 8  # the same as long as few were timed
_PROBE_STEPS = 4  # drafting steps in a row that look whether drafting pays again
_PROBE_SHARE = 0.03  # of the time, that probes may take more than plain steps would
_PROBE_AFTER = 32  # steps between probes at least
_MODEL_EVERY = 16  # drafting steps after which no slot looks up, so that the draft is known, too


class Step(NamedTuple):
    """A kind of step.

    Attributes:
      length: γ.
      looks_up: whether all drafts are looked up; else the draft model runs, where γ > 0.
    """

    length: int
    looks_up: bool = False

    @property
    def by_model(self) -> bool:
        return self.length > 0 and not self.looks_up


PLAIN = Step(0)


class Acceptance:
    """How often drafts were accepted, by their place in the block; old steps fade.

    Args:
      places: drafts in the longest block.
      memory: steps after which a step counts for 1/e.
      before: what is believed as long as little was seen; None is UNKNOWN for the
        first place, and for each later one what was seen at the place before it.
    """

    def __init__(self, places: int, memory: float, before: "Acceptance | None" = None):
        self._before = before
        self._fade = 1 - 1 / memory
        self._accepted = [0.0] * places
        self._examined = [0.0] * places
        self._records = 0
        self._rates: list[float] = []
        self._rated = -1  # records that the rates are of

    def record(self, accepted: int, examined: int) -> None:
        """One step: ``examined`` drafts were judged and the first ``accepted`` kept."""
        self._records += 1
        for place in range(len(self._examined)):
            self._accepted[place] = self._accepted[place] * self._fade + (place < accepted)
            self._examined[place] = self._examined[place] * self._fade + (place < examined)

    def rates(self) -> list[float]:
        """For each place, the chance that its draft is accepted if all before it were."""
        records = self._records + (0 if self._before is None else self._before._records)
        if records != self._rated:
            self._rated, self._rates = records, self._estimate()
        return self._rates

    def _estimate(self) -> list[float]:
        believed = None if self._before is None else self._before.rates()
        rates: list[float] = []
        for place, (accepted, examined) in enumerate(
                zip(self._accepted, self._examined, strict=True)):
            before = believed[place] if believed else rates[-1] if rates else UNKNOWN
            rates.append((accepted + _WEIGHT * before) / (examined + _WEIGHT))
        return rates


class Sources:
    """How often drafts of either source are accepted.

    Attributes:
      model: the draft model's.
      look_ups: looked-up ones, where any are found.
      found: whether any are, a block of one.
    """

    def __init__(self, places: int, memory: float, before: "Sources | None" = None):
        """Args: as of ``Acceptance``."""
        self.model: Acceptance = Acceptance(places, memory, before.model if before else None)
        self.look_ups: Acceptance = Acceptance(places, memory, before.look_ups if before else None)
        self.found: Acceptance = Acceptance(1, memory, before.found if before else None)

    def record_look_up(self, found: int, agreed: int, new: int) -> None:
        """One step with ``new`` tokens, the first ``agreed`` of which a look-up had said. Where
        it ended before its block, its next draft counts as refused: it brings nothing."""
        self.found.record(int(found > 0), 1)
        if found:
            self.look_ups.record(agreed, min(agreed + 1, new))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What is known of one running request.

    Attributes:
      sources: of its drafts.
      limit: drafts it takes in a step at the most.
      chosen: whether it leaves its drafts to the choice, and so may look them up beside a
        draft model.
    """

    sources: Sources
    limit: int
    chosen: bool = True

    def tokens(self, longest: int) -> list[float]:
        """Tokens expected of one step of the draft model, by draft length."""
        return self._expected(self.sources.model, longest)

    def looked_up(self, longest: int) -> list[float]:
        """The same where drafts are looked up, and found."""
        return self._expected(self.sources.look_ups, longest)

    @property
    def found(self) -> float:
        """How often a look-up finds any."""
        return self.sources.found.rates()[0]

    def _expected(self, acceptance: Acceptance, longest: int) -> list[float]:
        """1 + Σ_k Π_{i<=k} α_i."""
        expected, reached = [1.0], 1.0
        for place, rate in enumerate(acceptance.rates()[:longest]):
            reached *= rate if place < self.limit else 0.0
            expected.append(expected[-1] + reached)
        return expected


class DraftLengths:
    """Chooses the kind of each step among the compiled ones.

    Args:
      step_ms: time of a whole step by draft length, as timed at warm-up. Steps timed
        while running take their place, so that what is slower than plain decoding on
        this machine, at this load, is given up within some steps. Only that of 0, if there
        is no draft model.
      look_up_ms: the same of steps in which all drafts are looked up; empty without such.
    """

    def __init__(self, step_ms: Mapping[int, float], look_up_ms: Mapping[int, float] | None = None):
        look_ups = {Step(length, True): ms for length, ms in sorted((look_up_ms or {}).items())}
        self._warm = {Step(length): ms for length, ms in sorted(step_ms.items())} | look_ups
        self._longest = max(step.length for step in self._warm)
        self._looks_up = bool(look_ups)
        by_model = [step for step in self._warm if step.by_model]
        self._probe = next(iter(by_model or look_ups), None)  # what is tried where it is not best
        self._times: dict[Step, collections.deque[float]] = {
            step: collections.deque(maxlen=_TIMED) for step in self._warm}
        self._kinds: collections.OrderedDict[str, Sources] = collections.OrderedDict()
        self._since_plain = 0  # drafting steps since the last plain one
        self._untried = 0  # steps since the probe's kind was given up or last tried
        self._probing = 0  # steps left of a probe
        self._mixed = 0  # steps of the draft model in which slots might look up

    def newcomer(self, kind: str, limit: int, *, chosen: bool = True) -> Drafting:
        """A request that enters; requests of its kind tell what to expect of it."""
        known = self._kinds.setdefault(kind, Sources(self._longest, memory=256))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        return Drafting(sources=Sources(self._longest, memory=32, before=known), limit=limit,
                        chosen=chosen)

    def record(self, kind: str, drafting: Drafting, *, accepted: int, examined: int,
               ended: bool = False) -> None:
        """Counts of one step of one request: drafts of the draft model, or none.

        Args:
          ended: whether the request ended with the last accepted draft. Nothing came after it,
            so that it was no token more than without drafts: for the choice it was refused.
        """
        for sources in self._of(kind, drafting):
            sources.model.record(accepted - ended, examined)

    def record_look_up(self, kind: str, drafting: Drafting, *, found: int, agreed: int, new: int,
                       ended: bool = False) -> None:
        """What a look-up would have said, or did, of a step's new tokens.

        Args:
          ended: the same of the last one that it said.
        """
        for sources in self._of(kind, drafting):
            sources.record_look_up(found, agreed - ended, new)

    def _of(self, kind: str, drafting: Drafting) -> list[Sources]:
        return [drafting.sources, *filter(None, (self._kinds.get(kind),))]

    def timed(self, step: Step, milliseconds: float) -> None:
        """A step that ran with nothing else beside it."""
        self._times[step].append(milliseconds)

    def step_ms(self) -> dict[Step, float]:
        """What a step is expected to take: the median of late ones, or where too few were
        timed, the time at warm-up scaled by what happened to the others since."""
        found = {step: statistics.median(times) for step, times in self._times.items()
                 if len(times) >= _TRUSTED}
        scale = statistics.median([ms / self._warm[step] for step, ms in found.items()] or [1.])
        return {step: found.get(step, scale * ms) for step, ms in self._warm.items()}

    def choose(self, running: Sequence[Drafting], shortest: int = 0) -> Step:
        """The kind of the next step.

        Args:
          running: the requests that the step advances.
          shortest: a draft length that one of them asks for; one of the compiled. Its drafts
            are the draft model's, if there is one.
        """
        times = self.step_ms()
        steps = [step for step in self._warm if step.length >= shortest and (
            not shortest or self._probe is None or step.looks_up == self._probe.looks_up)]
        expected = self._expected(running)
        rate = {step: expected[step.looks_up][step.length] / times[step] for step in steps}
        best = max(steps, key=lambda step: (rate[step], -step.length))
        return best if shortest else self._explore(best, times)

    def _expected(self, running: Sequence[Drafting]) -> tuple[list[float], list[float]]:
        """Tokens of all requests by draft length, in steps of the draft model and in those
        that look up alone."""
        mixed, alone = [0.0] * (self._longest + 1), [0.0] * (self._longest + 1)
        for drafting in running:
            by_model = drafting.tokens(self._longest)
            if not self._looks_up:
                mixed = [sum(pair) for pair in zip(mixed, by_model, strict=True)]
                continue
            found, looked_up = drafting.found, drafting.looked_up(self._longest)
            for length, (one, other) in enumerate(zip(by_model, looked_up, strict=True)):
                mixed[length] += one + (found * max(other - one, 0.0) if drafting.chosen else 0.0)
                alone[length] += 1.0 + found * (other - 1.0)
        return mixed, alone

    def looking_up(self, running: Sequence[Drafting], step: Step) -> list[bool]:
        """Which requests take looked-up drafts, where there are any, in a step of the draft
        model."""
        self._mixed += 1
        if not self._looks_up or self._probing or self._mixed % _MODEL_EVERY == 0:
            return [False] * len(running)
        return [drafting.chosen and drafting.looked_up(self._longest)[step.length]
                > drafting.tokens(self._longest)[step.length] for drafting in running]

    def _explore(self, best: Step, times: Mapping[Step, float]) -> Step:
        """Now and then another kind of step: what is never done is never known."""
        if self._probe is None:
            return PLAIN
        if best.length:
            self._since_plain += 1
            known = len(self._times[PLAIN]) >= _TRUSTED
            if self._since_plain >= (_PLAIN_EVERY if known else _PLAIN_SOON):
                self._since_plain = 0
                return PLAIN
            if best.looks_up == self._probe.looks_up:
                self._untried = self._probing = 0
                return best
        if self._probing:
            self._probing -= 1
            return self._probe
        self._untried += 1
        # A probe in place of plain steps brings their tokens, too; in place of others, fewer.
        cost = _PROBE_STEPS * (times[self._probe] - (0.0 if best.length else times[PLAIN]))
        if self._untried >= max(_PROBE_AFTER, cost / (_PROBE_SHARE * times[best])):
            self._untried, self._probing = 0, _PROBE_STEPS
        return best
