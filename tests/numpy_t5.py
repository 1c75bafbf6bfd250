"""T5 in numpy, float64, one sequence at a time, no cache: an oracle that is not ours.

Written from the papers (Raffel et al. 2020; Shazeer 2020), on tensors named as
in the Hugging Face layout, with loops where loops are plainest.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def bucket(relative: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's bucket of ``relative = key position - query position``."""
    first = 0
    if bidirectional:
        buckets //= 2
        if relative > 0:
            first = buckets
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    log_ratio = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(log_ratio * (buckets - exact)), buckets - 1)


class NumpyT5:
    """Args: activation is "relu", "gelu" (tanh) or "silu"; gated if wi_1 is there."""

    def __init__(self, weights: Mapping[str, np.ndarray], *, num_heads: int, activation: str,
                 scale_outputs: bool, epsilon: float = 1e-6, buckets: int = 32,
                 max_distance: int = 128):
        self.w = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.heads, self.activation, self.scale = num_heads, activation, scale_outputs
        self.epsilon, self.buckets, self.max_distance = epsilon, buckets, max_distance

    def encode(self, source: Sequence[int]) -> np.ndarray:
        """[S, D] of one source without padding."""
        return self._stack("encoder", source, None)

    def logits(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """[T, V] after each of the decoder's input ids."""
        x = self._stack("decoder", target, self.encode(source))
        if self.scale:
            x = x / math.sqrt(x.shape[-1])
        return x @ self.w.get("lm_head.weight", self.w["shared.weight"]).T

    def _stack(self, stack: str, ids: Sequence[int], encoded: np.ndarray | None) -> np.ndarray:
        x = self.w["shared.weight"][list(ids)]
        bias = np.zeros(())
        layer = 0
        while f"{stack}.block.{layer}.layer.0.layer_norm.weight" in self.w:
            block = f"{stack}.block.{layer}.layer"
            table = f"{block}.0.SelfAttention.relative_attention_bias.weight"
            if table in self.w:
                bias = self._bias(self.w[table], len(ids), stack == "encoder")
            h = self._norm(x, f"{block}.0.layer_norm")
            x = x + self._attend(h, h, f"{block}.0.SelfAttention", bias)
            last = 1
            if encoded is not None:
                h = self._norm(x, f"{block}.1.layer_norm")
                x = x + self._attend(h, encoded, f"{block}.1.EncDecAttention", np.zeros(()))
                last = 2
            h = self._norm(x, f"{block}.{last}.layer_norm")
            x = x + self._feed_forward(h, f"{block}.{last}.DenseReluDense")
            layer += 1
        return self._norm(x, f"{stack}.final_layer_norm")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon)
        return x / rms * self.w[f"{name}.weight"]

    def _bias(self, table: np.ndarray, size: int, bidirectional: bool) -> np.ndarray:
        """[N, size, size], minus infinity where a decoder would see the future."""
        bias = np.empty((self.heads, size, size))
        for query in range(size):
            for key in range(size):
                bias[:, query, key] = table[bucket(
                    key - query, bidirectional, self.buckets, self.max_distance)]
                if key > query and not bidirectional:
                    bias[:, query, key] = -np.inf
        return bias

    def _attend(self, x: np.ndarray, y: np.ndarray, name: str, bias: np.ndarray) -> np.ndarray:
        def project(states: np.ndarray, letter: str) -> np.ndarray:  # [N, positions, H]
            flat = states @ self.w[f"{name}.{letter}.weight"].T
            return flat.reshape(len(states), self.heads, -1).transpose(1, 0, 2)

        q, k, v = project(x, "q"), project(y, "k"), project(y, "v")
        scores = q @ k.transpose(0, 2, 1) + bias
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        return mixed @ self.w[f"{name}.o.weight"].T

    def _feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        gated = f"{name}.wi_1.weight" in self.w
        h = x @ self.w[f"{name}.wi_0.weight" if gated else f"{name}.wi.weight"].T
        match self.activation:
            case "relu":
                h = np.maximum(h, 0)
            case "gelu":
                h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            case "silu":
                h = h / (1 + np.exp(-h))
        if gated:
            h = h * (x @ self.w[f"{name}.wi_1.weight"].T)
        return h @ self.w[f"{name}.wo.weight"].T


def numpy_twin(model: Any, weights: Mapping[str, np.ndarray]) -> NumpyT5:
    """The oracle on a model's own weights, under their Hugging Face names."""
    config = model.config
    return NumpyT5(weights, num_heads=config.num_heads,
                   activation=str(config.activation).removeprefix("gated-"),
                   scale_outputs=config.scale_decoder_outputs,
                   epsilon=config.layer_norm_epsilon,
                   buckets=config.relative_attention_num_buckets,
                   max_distance=config.relative_attention_max_distance)
