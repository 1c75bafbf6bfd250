"""A draft with random weights, and noisy copies of it whose acceptance is what one wants.

For measurements without a checkpoint: acceptance is set here, not found. The target is an
expansion of the draft (see expand_model.py), which gives the draft's logits; a copy's last map
is (W + x N) / sqrt(1 + x^2), with noise N of the size of W.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuspec.checkpoint import AbstractModel, named_parameters
from tpuspec.config import T5Config
from tpuspec.programs import overlap_of_logits, teacher_forced_logits
from tpuspec.sampling import SamplingParams, SlotSampling
from tpuspec.t5 import T5

SAMPLING = SamplingParams(temperature=1.0)
LOGIT_STD = 4.0  # of the draft's logits; with 1 every id would be about as likely as any other
_HALVINGS = 16


def random_draft(config: T5Config, dtype: jnp.dtype) -> T5:
    """With logits of LOGIT_STD.

    Args:
      config: of a model whose last map is apart from the embedding, as in T5 1.1.
    """
    model = T5(config, dtype=dtype, rngs=nnx.Rngs(0))
    return with_head(model, named_parameters(model)["lm_head.weight"] * LOGIT_STD)


def with_head(model: T5, head: jax.Array) -> T5:
    """The model with another last map [V, D]; shares the rest."""
    return AbstractModel(model.config, head.dtype).build(
        named_parameters(model) | {"lm_head.weight": head})


def mixed(signal: jax.Array, noise: jax.Array, share: float) -> jax.Array:
    """Of the same size as ``signal``, if both have one size: heads, or their logits."""
    whole = signal.astype(jnp.float32) + share * noise.astype(jnp.float32)
    return (whole / math.sqrt(1 + share**2)).astype(signal.dtype)


def noise_for(alpha: float, signal_BTV: jax.Array, noise_BTV: jax.Array) -> float:
    """The share of noise in a draft's logits that makes the mean Σ min(p, q) this.

    Args:
      alpha: below 1, and above what noise alone gives.
      signal_BTV, noise_BTV: float32 logits.
    """
    size = signal_BTV.shape[-1]
    options = SlotSampling.of([SAMPLING] * signal_BTV.shape[0]).options()
    tokens = jnp.zeros(signal_BTV.shape[:2], jnp.int32)  # which matter for other figures alone
    low, high = 0.0, 16.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rows = overlap_of_logits(signal_BTV, mixed(signal_BTV, noise_BTV, middle), tokens, options,
                                 vocabulary_size=size)
        low, high = (middle, high) if float(rows.overlap.mean()) > alpha else (low, middle)
    return (low + high) / 2


def noisy_drafts(model: T5, alphas: Sequence[float], source: Sequence[int], tokens: int,
           ) -> dict[float, tuple[float, T5]]:
    """By α wanted: the share of noise, and the draft. 1 is the model itself.

    Args:
      alphas: Σ min(p, q) at temperature 1, on average along so many random tokens.
      source: encoder ids.
    """
    head = named_parameters(model)["lm_head.weight"]
    noise = (jnp.asarray(LOGIT_STD * head.shape[1]**-0.5, head.dtype)
             * jax.random.normal(jax.random.key(1), head.shape, head.dtype))
    text = np.random.default_rng(1).integers(0, head.shape[0], (1, tokens), np.int32)
    lengths, sources = np.array([len(source)], np.int32), np.array([source], np.int32)
    signal, other = (teacher_forced_logits(*nnx.split(one), sources, lengths, text)
                     for one in (model, with_head(model, noise)))
    shares = {alpha: noise_for(alpha, signal, other) if alpha < 1 else 0.0 for alpha in alphas}
    return {alpha: (share, with_head(model, mixed(head, noise, share)))
            for alpha, share in shares.items()}
