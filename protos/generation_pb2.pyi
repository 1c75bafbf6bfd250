from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_PLAIN: _ClassVar[Origin]
    ORIGIN_ACCEPTED_DRAFT: _ClassVar[Origin]
    ORIGIN_CORRECTION: _ClassVar[Origin]
    ORIGIN_BONUS: _ClassVar[Origin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
ORIGIN_UNSPECIFIED: Origin
ORIGIN_PLAIN: Origin
ORIGIN_ACCEPTED_DRAFT: Origin
ORIGIN_CORRECTION: Origin
ORIGIN_BONUS: Origin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_ids", "allowed_ids", "lenience")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    banned_ids: _containers.RepeatedScalarFieldContainer[int]
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    lenience: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., banned_ids: _Optional[_Iterable[int]] = ..., allowed_ids: _Optional[_Iterable[int]] = ..., lenience: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling", "seed", "max_new_tokens", "eos_ids", "ignore_eos", "stop", "draft_length", "min_new_tokens", "logprobs", "decoder_text", "decoder_token_ids", "label", "n", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DECODER_TEXT_FIELD_NUMBER: _ClassVar[int]
    DECODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling: Sampling
    seed: int
    max_new_tokens: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    draft_length: int
    min_new_tokens: int
    logprobs: int
    decoder_text: str
    decoder_token_ids: TokenIds
    label: str
    n: int
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., stop: _Optional[_Iterable[str]] = ..., draft_length: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., decoder_text: _Optional[str] = ..., decoder_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., label: _Optional[str] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "origin", "text", "logprob", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    origin: Origin
    text: str
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., origin: _Optional[_Union[Origin, str]] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("target_runs", "emitted", "drafted", "examined", "accepted", "alpha", "alpha_overlap", "draft_acceptance_rate", "tokens_per_target_run", "c", "alpha_low", "alpha_high")
    TARGET_RUNS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    ALPHA_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_TARGET_RUN_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    ALPHA_LOW_FIELD_NUMBER: _ClassVar[int]
    ALPHA_HIGH_FIELD_NUMBER: _ClassVar[int]
    target_runs: int
    emitted: int
    drafted: int
    examined: int
    accepted: int
    alpha: float
    alpha_overlap: float
    draft_acceptance_rate: float
    tokens_per_target_run: float
    c: float
    alpha_low: float
    alpha_high: float
    def __init__(self, target_runs: _Optional[int] = ..., emitted: _Optional[int] = ..., drafted: _Optional[int] = ..., examined: _Optional[int] = ..., accepted: _Optional[int] = ..., alpha: _Optional[float] = ..., alpha_overlap: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., tokens_per_target_run: _Optional[float] = ..., c: _Optional[float] = ..., alpha_low: _Optional[float] = ..., alpha_high: _Optional[float] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "first_token_seconds", "decode_seconds", "total_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop", "source_tokens", "new_tokens", "seed", "draft_length", "timings", "predicted_speedup", "observed_speedup", "decode_tokens", "inexact")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop: str
    source_tokens: int
    new_tokens: int
    seed: int
    draft_length: int
    timings: Timings
    predicted_speedup: float
    observed_speedup: float
    decode_tokens: int
    inexact: bool
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., source_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., draft_length: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., predicted_speedup: _Optional[float] = ..., observed_speedup: _Optional[float] = ..., decode_tokens: _Optional[int] = ..., inexact: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "tokens", "text", "drafted", "accepted", "speculation", "finish", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    text: str
    drafted: int
    accepted: int
    speculation: Speculation
    finish: Finish
    index: int
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., text: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Limits(_message.Message):
    __slots__ = ("slots", "queue", "source_buckets", "max_new_tokens", "draft_lengths", "default_draft_length", "vocabulary_size", "message_bytes", "queue_tokens")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slots: int
    queue: int
    source_buckets: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    draft_lengths: _containers.RepeatedScalarFieldContainer[int]
    default_draft_length: int
    vocabulary_size: int
    message_bytes: int
    queue_tokens: int
    def __init__(self, slots: _Optional[int] = ..., queue: _Optional[int] = ..., source_buckets: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., draft_lengths: _Optional[_Iterable[int]] = ..., default_draft_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., message_bytes: _Optional[int] = ..., queue_tokens: _Optional[int] = ...) -> None: ...

class Cost(_message.Message):
    __slots__ = ("method", "target_ms", "draft_ms", "c", "verify_widening", "step_ms")
    class VerifyWideningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class StepMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WIDENING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    method: str
    target_ms: float
    draft_ms: float
    c: float
    verify_widening: _containers.ScalarMap[int, float]
    step_ms: _containers.ScalarMap[int, float]
    def __init__(self, method: _Optional[str] = ..., target_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., c: _Optional[float] = ..., verify_widening: _Optional[_Mapping[int, float]] = ..., step_ms: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("active_slots", "queued", "accepted", "refused", "finished", "cancelled", "failed", "compilations", "queued_tokens")
    ACTIVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    active_slots: int
    queued: int
    accepted: int
    refused: int
    finished: int
    cancelled: int
    failed: int
    compilations: int
    queued_tokens: int
    def __init__(self, active_slots: _Optional[int] = ..., queued: _Optional[int] = ..., accepted: _Optional[int] = ..., refused: _Optional[int] = ..., finished: _Optional[int] = ..., cancelled: _Optional[int] = ..., failed: _Optional[int] = ..., compilations: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "version", "platform", "devices", "target_config_json", "draft_config_json", "eos_id", "limits", "cost", "speculation", "load", "sampler")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    platform: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    target_config_json: str
    draft_config_json: str
    eos_id: int
    limits: Limits
    cost: Cost
    speculation: Speculation
    load: Load
    sampler: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., platform: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., target_config_json: _Optional[str] = ..., draft_config_json: _Optional[str] = ..., eos_id: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., sampler: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("directory", "seconds", "file", "data")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    directory: str
    seconds: float
    file: str
    data: bytes
    def __init__(self, directory: _Optional[str] = ..., seconds: _Optional[float] = ..., file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
