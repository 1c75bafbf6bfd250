"""Attention to a cache, one slot, head and query at a time, in NumPy's float64."""

import numpy as np


def heads_of(x: np.ndarray, head_width: int) -> np.ndarray:
    """[..., E] to [..., N, H]."""
    return x.reshape(*x.shape[:-1], -1, head_width).astype(np.float64)


def attend_one(q_H: np.ndarray, k_TH: np.ndarray, v_TH: np.ndarray, bias_T: np.ndarray):
    """A query's mix of exactly the positions given; 0 of none."""
    if not len(k_TH):
        return np.zeros_like(q_H)
    logits_T = k_TH @ q_H + bias_T
    weights_T = np.exp(logits_T - logits_T.max())
    return weights_T @ v_TH / weights_T.sum()


def verify_oracle(q_BGE, k_BGE, v_BGE, k_BTE, v_BTE, bias_ND, start_B):
    """Mixed values [B, G, E] and the two caches [B, T, E] afterwards."""
    slots, window, width = q_BGE.shape
    num_heads, distances = bias_ND.shape
    head_width = width // num_heads
    k_BTE, v_BTE, mixed_BGNH = k_BTE.copy(), v_BTE.copy(), heads_of(q_BGE, head_width)
    for b, start in enumerate(start_B):
        k_BTE[b, start : start + window] = k_BGE[b]
        v_BTE[b, start : start + window] = v_BGE[b]
        keys, values = heads_of(k_BTE[b], head_width), heads_of(v_BTE[b], head_width)
        for g in range(window):
            seen = start + g + 1
            distance = np.minimum(start + g - np.arange(seen), distances - 1)
            for n in range(num_heads):
                mixed_BGNH[b, g, n] = attend_one(
                    mixed_BGNH[b, g, n], keys[:seen, n], values[:seen, n], bias_ND[n, distance]
                )
    return mixed_BGNH.reshape(q_BGE.shape), k_BTE, v_BTE


def cross_oracle(q_BGE, k_BSE, v_BSE, lengths_B, head_width):
    """Mixed values [B, G, E]."""
    mixed_BGNH = heads_of(q_BGE, head_width)
    for b, length in enumerate(lengths_B):
        keys, values = heads_of(k_BSE[b], head_width), heads_of(v_BSE[b], head_width)
        for g in range(mixed_BGNH.shape[1]):
            for n in range(mixed_BGNH.shape[2]):
                mixed_BGNH[b, g, n] = attend_one(
                    mixed_BGNH[b, g, n], keys[:length, n], values[:length, n], np.zeros(length)
                )
    return mixed_BGNH.reshape(q_BGE.shape)
