"""What passes between the door, the engine loop and the streams: plain values."""

import dataclasses
import enum

from tpuspec.measurement import SpeculationStats
from tpuspec.sampling import SamplingParams


class Origin(enum.Enum):
    """Where a token comes from; every kind has the target's distribution."""

    PLAIN = "plain"
    ACCEPTED_DRAFT = "accepted draft"
    CORRECTION = "correction"
    BONUS = "bonus"


class Ending(enum.Enum):
    """Why an output ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One checked request.

    Attributes:
      request_id: the client's name for it, or the server's.
      source: encoder ids, final EOS included.
      sampling: how tokens are chosen.
      seed: in [0, 2**64).
      max_new_tokens: EOS included.
      min_new_tokens: before which neither end ids nor stop strings end the output.
      eos_ids: ids that end the output; may be empty.
      stop: strings that end the output.
      draft_length: drafts per step; 0 is plain decoding, None is chosen for every step.
      label: the request's kind.
      decoder_prompt: ids that the output begins with; not sent back.
      logprobs: number of most likely ids whose log-probabilities come with every token,
        beside the token's own; None is none at all.
      deadline: by the engine loop's clock, in seconds; None is never.
    """

    request_id: str
    source: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    draft_length: int | None
    label: str = ""
    decoder_prompt: tuple[int, ...] = ()
    logprobs: int | None = None
    deadline: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One new token and the text that became certain with it.

    Attributes:
      logprob: its log-probability under the target itself, if asked for.
      top_logprobs: ids and log-probabilities of the most likely ones, best first.
    """

    id: int
    origin: Origin
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds; see the proto for each definition."""

    queue: float
    first_token: float
    decode: float
    total: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
    """How a request ended.

    Attributes:
      ending: why.
      stop: the stop string that was found, or empty.
      decode_tokens: tokens after those of the request's first step.
      timings: how long it took.
    """

    ending: Ending
    stop: str
    decode_tokens: int
    timings: Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """New tokens of one or more steps.

    Attributes:
      tokens: in order.
      steps: counters of these steps.
      stats: counters since the beginning of the request.
      finish: set in the last chunk and in no other.
    """

    tokens: tuple[Token, ...]
    steps: SpeculationStats
    stats: SpeculationStats
    finish: Finish | None = None

    def merged(self, later: "TokenChunk") -> "TokenChunk":
        return TokenChunk(
            tokens=self.tokens + later.tokens, steps=self.steps + later.steps,
            stats=later.stats, finish=later.finish)
