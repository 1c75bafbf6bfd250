"""The bundled pair: loads as any checkpoint does, and speculation changes no greedy id."""

import pathlib

import numpy as np
import pytest

import tpuspec
from tpuspec import checkpoint
from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.sampling import SamplingParams

PAIR = pathlib.Path(tpuspec.__file__).parent / "demo_pair"
PROMPTS = pathlib.Path(__file__).parent / "data" / "demo_prompts.txt"
LIMIT_MIB = 30


@pytest.fixture(scope="module")
def pair():
    return tuple(checkpoint.load(PAIR / name, dtype=np.float32) for name in ("target", "draft"))


def greedy(engine: Engine, sources: list[list[int]], draft_length: int) -> list[list[int]]:
    """Continuous batching over all slots."""
    waiting, owner, ids = list(range(len(sources))), {}, [[] for _ in sources]
    free = list(range(engine.config.slots))
    while waiting or owner:
        while waiting and free:
            slot, i = free.pop(), waiting.pop(0)
            owner[slot] = i
            engine.insert(slot, sources[i], sampling=SamplingParams(), seed=0,
                          max_new_tokens=48, eos_ids=(1,), draft_length=draft_length)
        output = engine.step().read()
        for slot, i in list(owner.items()):
            ids[i] += output.tokens[slot, :output.num_tokens[slot]].tolist()
            if output.finish[slot]:
                free.append(slot)
                del owner[slot]
    return ids


def test_greedy_speculative_ids_equal_plain_ids_on_200_prompts(pair):
    target, draft = pair
    config = EngineConfig(slots=4, source_buckets=(48,), max_target_length=48,
                          draft_lengths=(0, 4), draft_length=4)
    engine = Engine(target.model, draft.model, config, vocabulary_size=target.vocabulary.size)
    engine.compile()
    sources = [target.vocabulary.encode(line) for line in PROMPTS.read_text().splitlines()]
    assert len(sources) == 200
    compiled = engine.compilations
    plain = greedy(engine, sources, 0)
    speculative = greedy(engine, sources, 4)
    assert speculative == plain
    assert engine.compilations == compiled
    assert np.mean([row[-1] == 1 for row in plain]) > 0.5  # sentences that end


def test_the_pair_shares_its_vocabulary_and_fits_the_package(pair):
    target, draft = pair
    assert target.vocabulary.differences(draft.vocabulary) is None
    assert target.config.vocab_size >= target.vocabulary.size
    size = sum(f.stat().st_size for f in PAIR.rglob("*") if f.is_file())
    assert size < LIMIT_MIB * 2**20


def test_task_prefixes_are_pieces_of_their_own(pair):
    vocabulary = pair[0].vocabulary
    text = "translate English to German: Good morning."
    ids = vocabulary.encode(text)
    assert len(ids) < 8 and ids[-1] == 1
    assert vocabulary.decode(ids) == text
