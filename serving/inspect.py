"""``tpuspec inspect``: what a model in files is, and whether it and another can be a pair."""

import argparse
import json
from typing import Any

from tpuspec import checkpoint, model_sources
from tpuspec.checkpoint import Description
from tpuspec.presets import PRESETS, family


def run(args: argparse.Namespace) -> int:
    found = model_sources.describe(args.checkpoint)
    facts = describe(found)
    if args.verify:
        checkpoint.check_sums(args.checkpoint)
        facts["verified"] = True
    if args.against is not None:
        facts["pair_problems"] = pair_problems(found, model_sources.describe(args.against))
    if args.json:
        print(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        for name, value in facts.items():
            print(f"{name:<22}{_shown(value)}")
    return 1 if facts.get("pair_problems") else 0


def describe(found: Description) -> dict[str, Any]:
    """Facts for people and programs."""
    config, vocabulary = found.config, found.vocabulary
    shapes = config.to_json() | {"vocab_size": None, "quantization": None}
    return {
        "path": str(found.path),
        "layout": found.layout,
        "family": family(config),
        "shapes_of": [name for name, preset in PRESETS.items()
                      if preset.to_json() | {"vocab_size": None} == shapes],
        "parameters": found.parameters,
        "dtype": found.dtype,
        "quantization": config.quantization,
        "bytes_on_device": found.weight_bytes,
        "vocabulary": None if vocabulary is None else vocabulary.size,
        "embedding_rows": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "model": config.to_json(),
        "provenance": found.provenance,
    }


def pair_problems(one: Description, other: Description) -> list[str]:
    """Why the two cannot be target and draft of each other; empty if they can."""
    problems = []
    if (one.vocabulary is None) != (other.vocabulary is None):
        lacks = one if one.vocabulary is None else other
        problems.append(f"{lacks.path} has no vocabulary: they cannot be compared")
    elif one.vocabulary is not None and other.vocabulary is not None:
        if (difference := one.vocabulary.differences(other.vocabulary)) is not None:
            problems.append("the vocabularies differ: " + difference)
    if one.config.eos_token_id != other.config.eos_token_id:
        problems.append(f"eos_token_id is {one.config.eos_token_id} and "
                        f"{other.config.eos_token_id}")
    return problems


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
