"""Frozen configurations, checked when they are made.

Dimension letters, used as array-name suffixes and as jaxtyping strings in the
whole package: ``B`` slots, ``S`` source tokens, ``T`` decoder positions in the
cache, ``G`` positions in one pass (draft length + 1 in verify), ``D`` model
width, ``F`` feed-forward, ``N`` heads, ``H`` head width, ``V`` vocabulary,
``L`` layers.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

_MOST_LAYERS = 1000  # of a stack: a damaged file must not keep a machine busy for hours


class Activation(enum.StrEnum):
    """Feed-forward kinds of the T5 family. GELU is always the tanh form."""

    RELU = "relu"
    GATED_GELU = "gated-gelu"
    GATED_SILU = "gated-silu"

    @property
    def gated(self) -> bool:
        return self is not Activation.RELU


class Quantization(enum.StrEnum):
    """How weights are stored where they are not of the model's dtype."""

    INT8 = "int8"


class Sampler(enum.StrEnum):
    """How drafts are made and judged.

    ``REJECTION``: by the accept test of speculative sampling, which accepts as many drafts as any
    exact rule can. ``COUPLED``: by random numbers that target and draft share, so that a seed gives
    one output whatever the draft and the draft length (see ``tpuspec.coupled_sampling``).
    """

    REJECTION = "rejection"
    COUPLED = "coupled"


def check_range(name: str, value: float, low: float, high: float | None) -> None:
    """Raises ValueError naming the field, the value and the bound."""
    if value >= low and (high is None or value <= high):
        return  # written so that NaN fails
    bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{name} must be {bound}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Shapes and switches of one encoder-decoder model.

    Attributes:
      vocab_size: V, rows of the embedding (padded; see ``Vocabulary.size``).
      d_model: D.
      d_kv: H, width of one head.
      d_ff: F.
      num_heads: N.
      num_layers: encoder layers.
      num_decoder_layers: L, decoder layers.
      activation: feed-forward kind.
      tie_word_embeddings: logits from the input embedding (T5 1.0).
      scale_decoder_outputs: multiply the decoder's output by D**-0.5 before the
        logits; None means "when tied", as every published T5 does.
      per_layer_relative_bias: a bias table in every layer (umT5), not only in
        the first of each stack.
      relative_attention_num_buckets: rows of a relative-bias table.
      relative_attention_max_distance: distance from which the bias is constant.
      layer_norm_epsilon: added to the mean square in RMSNorm.
      decoder_start_token_id: the id at decoder position 0; a real id in T5 (0).
      eos_token_id: the id that ends an output by default.
      pad_token_id: the id that fills unused source positions; never a mask.
      quantization: of the linear maps other than the feed-forward output and the
        logits, with one float32 scale for each output channel; None is none.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    activation: Activation = Activation.GATED_GELU
    tie_word_embeddings: bool = False
    scale_decoder_outputs: bool | None = None
    per_layer_relative_bias: bool = False
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 0
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", Activation(self.activation))
        if self.quantization is not None:
            object.__setattr__(self, "quantization", Quantization(self.quantization))
        if self.scale_decoder_outputs is None:
            object.__setattr__(self, "scale_decoder_outputs", self.tie_word_embeddings)
        self._check_kinds()
        for name in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads",
                     "num_layers", "num_decoder_layers"):
            check_range(name, getattr(self, name), 1, None)
        check_range("relative_attention_num_buckets",
                    self.relative_attention_num_buckets, 4, None)
        check_range("relative_attention_max_distance",
                    self.relative_attention_max_distance,
                    self.relative_attention_num_buckets + 1, None)
        for name in ("num_layers", "num_decoder_layers"):
            check_range(name, getattr(self, name), 1, _MOST_LAYERS)
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
            check_range(name, getattr(self, name), 0, self.vocab_size - 1)
        check_range("layer_norm_epsilon", self.layer_norm_epsilon, 0.0, 1.0)

    def _check_kinds(self) -> None:
        """JSON of others has been seen with texts for numbers."""
        kinds = {int: "a whole number", bool: "true or false", float: "a number"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = bool if field.name == "scale_decoder_outputs" else field.type
            if wanted in kinds and type(value) not in ((int, float) if wanted is float
                                                       else (wanted,)):
                raise ValueError(f"{field.name} must be {kinds[wanted]}, got {value!r}")

    @property
    def inner_dim(self) -> int:
        """N * H; not D in general."""
        return self.num_heads * self.d_kv

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, enum.StrEnum) else value
                for name, value in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "T5Config":
        """Raises ValueError naming unknown or missing fields."""
        known = {f.name for f in dataclasses.fields(cls)}
        required = {f.name for f in dataclasses.fields(cls)
                    if f.default is dataclasses.MISSING}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown model configuration fields: {unknown}")
        if missing := sorted(required - set(fields)):
            raise ValueError(f"missing model configuration fields: {missing}")
        return cls(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Fixed shapes of one engine. Everything else is an array.

    Attributes:
      slots: B, requests that run at once.
      source_buckets: padded source lengths (EOS included), ascending; the last
        is the longest source allowed.
      max_target_length: most new tokens of one request.
      draft_lengths: the ladder of compiled draft lengths; 0 is plain decoding.
      draft_length: draft length of a request that names none; None chooses one before
        every step (see ``draft_lengths``).
      sampler: how drafts are judged.
      ngram_drafts: drafts may be looked up in source and text (see ``ngram_drafts``):
        all of them in an engine without a draft model; with one, where ``draft_length``
        is None, as the same choice says.
    """

    slots: int = 4
    source_buckets: tuple[int, ...] = (32, 128, 512)
    max_target_length: int = 256
    draft_lengths: tuple[int, ...] = (0, 1, 2, 3, 5, 7)
    draft_length: int | None = 3
    sampler: Sampler = Sampler.REJECTION
    ngram_drafts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", Sampler(self.sampler))
        check_range("slots", self.slots, 1, None)
        check_range("max_target_length", self.max_target_length, 1, None)
        for name, low in (("source_buckets", 1), ("draft_lengths", 0)):
            values = getattr(self, name)
            if not values or tuple(sorted(set(values))) != tuple(values) or values[0] < low:
                raise ValueError(f"{name} must be ascending, distinct and at least {low}, "
                                 f"got {values}")
        if self.draft_lengths[0] != 0:
            raise ValueError(f"draft_lengths must begin with 0, got {self.draft_lengths}")
        if self.draft_length is None:
            check_range("draft_lengths of a ladder to choose from", self.max_draft_length, 1, None)
        elif self.draft_length not in self.draft_lengths:
            raise ValueError(f"draft_length must be one of {self.draft_lengths}, "
                             f"got {self.draft_length}")

    @property
    def max_source_length(self) -> int:
        return self.source_buckets[-1]

    @property
    def max_draft_length(self) -> int:
        return self.draft_lengths[-1]

    @property
    def target_positions(self) -> int:
        """T: the start token, the longest output, and room for one window more,
        so that no write is ever shifted back at the end of the buffer."""
        return 1 + self.max_target_length + self.max_draft_length + 1

    def source_bucket(self, length: int) -> int:
        return next(bucket for bucket in self.source_buckets if bucket >= length)

    def rung(self, draft_length: int) -> int:
        return next(rung for rung in self.draft_lengths if rung >= draft_length)
