"""The door: every field of a request is checked here, before any work is done.

Errors name the field, the value and the bound.
"""

import math
import secrets
import uuid
from collections.abc import Iterable

from tpuspec.config import EngineConfig
from tpuspec.decode_state import MAX_EOS_IDS
from tpuspec.protos import generation_pb2 as pb
from tpuspec.sampling import SamplingParams, check_min_new_tokens
from tpuspec.serving.interfaces import Vocabulary
from tpuspec.serving.request import Request
from tpuspec.token_logprobs import MAX_TOP_LOGPROBS

MAX_REQUEST_ID = 256  # characters
MAX_LABEL = 64  # characters
MAX_PRIORITY = 100
MAX_STOPS = 8
MAX_STOP_LENGTH = 256  # characters
MAX_TEXT = 1 << 20  # characters; tokenizing more would only delay the refusal


class Door:
    """Makes checked requests of messages.

    Args:
      config: limits and defaults.
      vocabulary_size: ids at or beyond it are refused.
      eos_id: ends every source, and every output by default.
      vocabulary: for texts; without one only ids are taken.
    """

    def __init__(self, config: EngineConfig, *, vocabulary_size: int, eos_id: int,
                 vocabulary: Vocabulary | None):
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._eos_id = eos_id
        self._vocabulary = vocabulary

    def check(self, message: pb.GenerateRequest, deadline: float | None = None) -> Request:
        """Raises ValueError on the first field that is out of bounds."""
        config = self._config
        _check_length("request_id", len(message.request_id), 0, MAX_REQUEST_ID, "characters")
        # The cheap fields first: a refusal should not wait for the tokenizer.
        sampling = self._sampling(message.sampling)
        if message.HasField("max_new_tokens"):
            _check("max_new_tokens", message.max_new_tokens, 1, config.max_target_length)
            decoder_prompt = self._decoder_prompt(message, message.max_new_tokens)
            max_new_tokens = message.max_new_tokens
        else:
            decoder_prompt = self._decoder_prompt(message, 1)
            max_new_tokens = config.max_target_length - len(decoder_prompt)
        draft_length = (message.draft_length if message.HasField("draft_length")
                        else config.draft_length)
        if draft_length is not None:
            _check("draft_length", draft_length, 0, config.max_draft_length)
        _check_length("label", len(message.label), 0, MAX_LABEL, "characters")
        logprobs = message.logprobs if message.HasField("logprobs") else None
        if logprobs is not None:
            _check("logprobs", logprobs, 0, min(MAX_TOP_LOGPROBS, self._vocabulary_size))
        n = message.n if message.HasField("n") else 1
        _check("n", n, 1, config.slots)
        _check("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
        eos_ids = self._eos_ids(message)
        check_min_new_tokens(message.min_new_tokens, max_new_tokens=max_new_tokens,
                             eos_ids=eos_ids, sampling=sampling,
                             vocabulary_size=self._vocabulary_size)
        return Request(
            request_id=message.request_id or uuid.uuid4().hex,
            sampling=sampling, max_new_tokens=max_new_tokens, draft_length=draft_length,
            label=message.label,
            min_new_tokens=message.min_new_tokens, eos_ids=eos_ids, stop=self._stop(message.stop),
            source=self._source(message), deadline=deadline, logprobs=logprobs,
            decoder_prompt=decoder_prompt, n=n, priority=message.priority,
            # 53 bits survive every JSON reader, so that an echoed seed can be used again.
            seed=message.seed if message.HasField("seed") else secrets.randbits(53))

    def _sampling(self, message: pb.Sampling) -> SamplingParams:
        for name in ("temperature", "top_p", "min_p", "lenience"):
            value = getattr(message, name)
            if not math.isfinite(value):
                raise ValueError(f"sampling.{name} must be finite, got {value}")
        try:
            params = SamplingParams(
                temperature=message.temperature, top_k=message.top_k,
                top_p=message.top_p if message.HasField("top_p") else 1.0, min_p=message.min_p,
                repetition_penalty=message.repetition_penalty if message.HasField(
                    "repetition_penalty") else 1.0,
                presence_penalty=message.presence_penalty,
                frequency_penalty=message.frequency_penalty, logit_bias=dict(message.logit_bias),
                banned_ids=tuple(message.banned_ids), allowed_ids=tuple(message.allowed_ids),
                lenience=message.lenience if message.HasField("lenience") else 1.0)
            params.check_ids(self._vocabulary_size)
            params.check_sampler(self._config.sampler)
            return params
        except ValueError as error:
            raise ValueError(f"sampling.{error}") from None

    def _eos_ids(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        if message.ignore_eos:
            if message.eos_ids:
                raise ValueError("eos_ids must be empty with ignore_eos, "
                                 f"got {len(message.eos_ids)} ids")
            return ()
        _check_length("eos_ids", len(message.eos_ids), 0, MAX_EOS_IDS, "ids")
        self._check_ids("eos_ids", message.eos_ids)
        return tuple(message.eos_ids) or (self._eos_id,)

    def _stop(self, stops: Iterable[str]) -> tuple[str, ...]:
        stops = tuple(stops)
        _check_length("stop", len(stops), 0, MAX_STOPS, "strings")
        for place, stop in enumerate(stops):
            _check_length(f"stop[{place}]", len(stop), 1, MAX_STOP_LENGTH, "characters")
        if stops and self._vocabulary is None:
            raise ValueError("stop must be empty: this model has no vocabulary")
        return stops

    def _source(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        match message.WhichOneof("source"):
            case "text":
                if self._vocabulary is None:
                    raise ValueError("text needs a vocabulary and this model has none: "
                                     "send token_ids")
                _check_length("text", len(message.text), 0, MAX_TEXT, "characters")
                name, ids = "text", self._vocabulary.encode(message.text)
            case "token_ids":
                name, ids = "token_ids", list(message.token_ids.ids)
                if not ids:
                    raise ValueError("token_ids must have at least 1 id, got 0")
                if len(ids) <= self._config.max_source_length:  # else refused below, at once
                    self._check_ids(name, ids)
                if ids[-1] != self._eos_id:
                    ids.append(self._eos_id)
            case _:
                raise ValueError("source must be set: text or token_ids")
        limit = self._config.max_source_length
        if len(ids) > limit:
            raise ValueError(f"{name} must have at most {limit} tokens with the final "
                             f"end-of-sequence id, got {len(ids)}")
        return tuple(ids)

    def _decoder_prompt(self, message: pb.GenerateRequest, new_tokens: int) -> tuple[int, ...]:
        """Args: new_tokens: for which there must be room behind it."""
        match name := message.WhichOneof("decoder_prompt"):
            case "decoder_text":
                if self._vocabulary is None:
                    raise ValueError("decoder_text needs a vocabulary and this model has none: "
                                     "send decoder_token_ids")
                _check_length(name, len(message.decoder_text), 0, MAX_TEXT, "characters")
                ids = self._vocabulary.encode(message.decoder_text)[:-1]
            case "decoder_token_ids":
                ids = list(message.decoder_token_ids.ids)
            case _:
                return ()
        limit = self._config.max_target_length
        if len(ids) > limit - new_tokens:
            raise ValueError(f"{name} must have at most {limit - new_tokens} tokens, which is "
                             f"{limit} less max_new_tokens (or 1), got {len(ids)}")
        self._check_ids(name, ids)
        return tuple(ids)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for place, value in enumerate(ids):
            _check(f"{name}[{place}]", value, 0, self._vocabulary_size - 1)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def _check_length(name: str, length: int, low: int, high: int, unit: str) -> None:
    if not low <= length <= high:
        raise ValueError(f"{name} must have {low} to {high} {unit}, got {length}")
