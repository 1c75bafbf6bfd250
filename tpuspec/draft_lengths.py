"""How many tokens to draft in the next step, from what was accepted so far.

Eq. (5) of Leviathan et al. (2022) with what is known of the requests that run and of
this machine: acceptance by place in the block, since drafts after the first are often
accepted less, and times of whole steps. All slots share a step, so that there is one
draft length at a time: the one that gives most tokens a second over all of them.

Host code without arrays: a choice for 8 requests takes a tenth of a millisecond, while the
step before it runs.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

UNKNOWN = 0.7  # acceptance of a first draft about which nothing is known
_WEIGHT = 4.0  # drafts that what is known beforehand counts for
_KINDS = 256  # labels remembered; the longest unused is forgotten
_TIMED = 7  # step times kept for each draft length
_TRUSTED = 3  # of them, before they stand for themselves
_PLAIN_EVERY = 128  # drafting steps after which a plain one is timed again
_PLAIN_SOON = 8  # the same as long as few were timed
_PROBE_STEPS = 4  # drafting steps in a row that look whether drafting pays again
_PROBE_SHARE = 0.03  # of the time, that probes may take more than plain steps would
_PROBE_AFTER = 32  # plain steps between probes at least


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

    def record(self, accepted: int, examined: int) -> None:
        """One step: ``examined`` drafts were judged and the first ``accepted`` kept."""
        for place in range(len(self._examined)):
            self._accepted[place] = self._accepted[place] * self._fade + (place < accepted)
            self._examined[place] = self._examined[place] * self._fade + (place < examined)

    def rates(self) -> list[float]:
        """For each place, the chance that its draft is accepted if all before it were."""
        believed = None if self._before is None else self._before.rates()
        rates: list[float] = []
        for place, (accepted, examined) in enumerate(
                zip(self._accepted, self._examined, strict=True)):
            before = believed[place] if believed else rates[-1] if rates else UNKNOWN
            rates.append((accepted + _WEIGHT * before) / (examined + _WEIGHT))
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What is known of one running request.

    Attributes:
      acceptance: of its drafts.
      limit: drafts it takes in a step at the most.
    """

    acceptance: Acceptance
    limit: int

    def tokens(self, longest: int) -> list[float]:
        """Tokens expected of one step, by draft length: 1 + Σ_k Π_{i<=k} α_i."""
        expected, reached = [1.0], 1.0
        for place, rate in enumerate(self.acceptance.rates()[:longest]):
            reached *= rate if place < self.limit else 0.0
            expected.append(expected[-1] + reached)
        return expected


class DraftLengths:
    """Chooses the draft length of each step among the compiled ones.

    Args:
      step_ms: time of a whole step by draft length, as timed at warm-up. Steps timed
        while running take their place, so that what is slower than plain decoding on
        this machine, at this load, is given up within some steps.
    """

    def __init__(self, step_ms: Mapping[int, float]):
        self._warm = dict(sorted(step_ms.items()))
        self._longest = max(self._warm)
        self._times: dict[int, collections.deque[float]] = {
            length: collections.deque(maxlen=_TIMED) for length in self._warm}
        self._kinds: collections.OrderedDict[str, Acceptance] = collections.OrderedDict()
        self._since_plain = 0  # drafting steps since the last plain one
        self._plain_steps = 0  # since drafting was given up or last tried
        self._probing = 0  # steps left of a probe

    def newcomer(self, kind: str, limit: int) -> Drafting:
        """A request that enters; requests of its kind tell what to expect of it."""
        acceptance = self._kinds.setdefault(kind, Acceptance(self._longest, memory=256))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        return Drafting(acceptance=Acceptance(self._longest, memory=32, before=acceptance),
                        limit=limit)

    def record(self, kind: str, drafting: Drafting, *, accepted: int, examined: int) -> None:
        """Counts of one step of one request."""
        drafting.acceptance.record(accepted, examined)
        if kind in self._kinds:
            self._kinds[kind].record(accepted, examined)

    def timed(self, draft_length: int, milliseconds: float) -> None:
        """A step that ran with nothing else beside it."""
        self._times[draft_length].append(milliseconds)

    def step_ms(self) -> dict[int, float]:
        """What a step is expected to take: the median of late ones, or where too few were
        timed, the time at warm-up scaled by what happened to the others since."""
        found = {length: statistics.median(times) for length, times in self._times.items()
                 if len(times) >= _TRUSTED}
        scale = statistics.median([ms / self._warm[length] for length, ms in found.items()] or [1.])
        return {length: found.get(length, scale * ms) for length, ms in self._warm.items()}

    def choose(self, running: Sequence[Drafting], shortest: int = 0) -> int:
        """The draft length of the next step.

        Args:
          running: the requests that the step advances.
          shortest: a draft length that one of them asks for; one of the compiled.
        """
        times = self.step_ms()
        lengths = [length for length in self._warm if length >= shortest]
        expected = [drafting.tokens(self._longest) for drafting in running]
        rate = {length: sum(tokens[length] for tokens in expected) / times[length]
                for length in lengths}
        best = max(lengths, key=lambda length: (rate[length], -length))
        return best if shortest else self._explore(best, times)

    def _explore(self, best: int, times: Mapping[int, float]) -> int:
        """Now and then the other kind of step: what is never done is never known."""
        drafting = [length for length in self._warm if length]
        if not drafting:
            return 0
        if best:
            self._plain_steps = self._probing = 0
            self._since_plain += 1
            known = len(self._times[0]) >= _TRUSTED
            if self._since_plain < (_PLAIN_EVERY if known else _PLAIN_SOON):
                return best
            self._since_plain = 0
            return 0
        if self._probing:
            self._probing -= 1
            return drafting[0]
        self._plain_steps += 1
        cost = _PROBE_STEPS * (times[drafting[0]] - times[0])
        if self._plain_steps >= max(_PROBE_AFTER, cost / (_PROBE_SHARE * times[0])):
            self._plain_steps, self._probing = 0, _PROBE_STEPS
        return 0
