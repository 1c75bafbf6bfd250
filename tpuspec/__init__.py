"""Exact speculative decoding of encoder-decoder models.

The names below load when they are first used, so that a gRPC client, which
imports this package too, does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpuspec.platform import keep_libtpu_quiet

if TYPE_CHECKING:
    from tpuspec.config import EngineConfig as EngineConfig
    from tpuspec.config import T5Config as T5Config
    from tpuspec.decode_state import FinishReason as FinishReason
    from tpuspec.engine import Engine as Engine
    from tpuspec.measurement import CostReport as CostReport
    from tpuspec.measurement import SpeculationStats as SpeculationStats
    from tpuspec.sampling import SamplingParams as SamplingParams
    from tpuspec.t5 import T5 as T5
    from tpuspec.vocabulary import Vocabulary as Vocabulary

_HOMES = {
    "CostReport": "measurement",
    "Engine": "engine",
    "EngineConfig": "config",
    "FinishReason": "decode_state",
    "SamplingParams": "sampling",
    "SpeculationStats": "measurement",
    "T5": "t5",
    "T5Config": "config",
    "Vocabulary": "vocabulary",
}

__all__ = list(_HOMES)

keep_libtpu_quiet()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
