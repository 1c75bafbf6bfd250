"""What passes between the door, the engine loop and the streams: plain values."""

import dataclasses
import enum
import hashlib

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
      n: samples, outputs of the same source; ``sample`` makes them requests of their own.
      priority: those of a higher one leave the queue first.
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
    n: int = 1
    priority: int = 0

    def sample(self, index: int) -> "Request":
        """One of the samples; the first is what the request gives without ``n``."""
        seed = self.seed
        if index:  # 53 bits, which every JSON reader keeps
            digest = hashlib.blake2b(f"{seed}/sample {index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 11
        return dataclasses.replace(self, seed=seed, n=1)

    @property
    def most_tokens(self) -> int:
        """Of source, decoder prompt and output."""
        return len(self.source) + len(self.decoder_prompt) + self.max_new_tokens


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
      seed: of the sample.
      decode_tokens: tokens after those of the request's first step.
      timings: how long it took.
    """

    ending: Ending
    stop: str
    seed: int
    decode_tokens: int
    timings: Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """New tokens of one or more steps.

    Attributes:
      tokens: in order.
      steps: counters of these steps.
      stats: counters since the beginning of the request.
      finish: set in the sample's last chunk and in no other.
      index: of the request's sample.
    """

    tokens: tuple[Token, ...]
    steps: SpeculationStats
    stats: SpeculationStats
    finish: Finish | None = None
    index: int = 0

    def merged(self, later: "TokenChunk") -> "TokenChunk":
        """This chunk and a later one of the same sample as one."""
        return dataclasses.replace(
            later, tokens=self.tokens + later.tokens, steps=self.steps + later.steps)
