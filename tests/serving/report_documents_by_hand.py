"""One document of each kind that ``tpuspec report`` takes, with made-up round figures."""

import copy
from typing import Any


def _pass(width: int, ms: float, moved: int) -> dict[str, Any]:
    return {"width": width, "ms": ms, "moved": moved, "bytes_per_s": moved / (1e-3 * ms),
            "share_of_copy": 0.5}


def _row(gamma: int, speedup: float, widening: float) -> dict[str, Any]:
    return {"temperature": 0.0, "gamma": gamma, "alpha": 0.8125, "alpha_low": 0.75,
            "alpha_high": 0.875, "c": 0.0703, "widening": widening,
            "tokens_per_target_run": 1.7321 if gamma == 1 else 2.8333,
            "predicted_speedup": 1.5937, "observed_speedup": speedup,
            "observed_speedup_low": speedup - 0.1, "observed_speedup_high": speedup + 0.1,
            "plain_tokens_per_s": 51.7, "speculative_tokens_per_s": None}


_MADE: dict[str, dict[str, Any]] = {
    "alpha": {
        "target": "large", "dtype": "float32", "impossible_tokens": 0, "rows": [{
            "temperature": 0.0, "draft": "bigram", "alpha": 0.1891, "alpha_low": 0.137,
            "alpha_high": None, "tokens": 4030, "prompts": 47, "tokens_per_target_run": [
                {"gamma": gamma, "of_these_texts": 1.0 + 0.02 * gamma, "independent": 1.2,
                 "equation_1": 1.2} for gamma in (1, 3, 5, 7)]}]},
    "speedup": {
        "target": "large", "draft": "small", "platform": "cpu", "dtype": "float32", "prompts": 8,
        "repeats": 3, "cost_method": "median of made-up runs",
        "rows": [_row(1, 1.3711, 1.1), _row(3, 1.7713, 1.25)]},
    "cost": {
        "target": "large", "draft": "small", "platform": "cpu", "dtype": "float32",
        "source": 64, "length": 128, "batches": [{
            "slots": 1, "c": 0.0417, "copy_bytes_per_s": 28e9, "product_flops_per_s": 193e9,
            "draft": _pass(1, 0.5, 1_400_000),
            "target": [{**_pass(1, 12.0, 22_000_000), "widening": 1.0},
                       {**_pass(4, 15.0, 22_000_000), "widening": 1.25},
                       {**_pass(8, 18.0, 22_000_000), "widening": 1.5}]}]},
    "verify": {
        "target": "large", "draft": "small", "dtype": "float32", "gamma": 3, "samples": 300,
        "sources": 1, "family_level": 0.001, "power": 0.9, "passed": True, "greedy": {},
        "tests": [{"kind": "drift", "p_value": 0.4321, "adjusted_p_value": 0.9876}],
        "frequencies": [{"source": 0, "position": 1, "outputs": 300, "ids": [
            {"id": 7, "text": " Wo", "target": 0.6, "draft": 0.5, "count": 183},
            {"id": None, "text": None, "target": 0.4, "draft": 0.5, "count": 117}]}]},
    "demo": {
        "samples": [{"source": "Where is it?", "text": "Wo ist es?", "tokens": [
            {"id": 5, "text": "Wo", "origin": "accepted_draft"},
            {"id": 6, "text": " ist", "origin": "accepted_draft"},
            {"id": 7, "text": " es", "origin": "bonus"},
            {"id": 8, "text": "?", "origin": "correction"},
            {"id": 1, "text": "", "origin": "accepted_draft"}]}],
        "alpha": 0.8472, "draft_acceptance_rate": 0.7, "c": 0.0823, "gamma": 2,
        "tokens_per_target_run": 2.1234, "predicted_speedup": 1.8011, "observed_speedup": 1.6022}}


def made() -> dict[str, dict[str, Any]]:
    """By name; a copy, which a test may change."""
    return copy.deepcopy(_MADE)
