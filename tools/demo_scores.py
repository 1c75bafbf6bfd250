"""Outputs and scores of the demo pair's models: BLEU, chrF, exact match, α."""

import dataclasses
import functools

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import sacrebleu
from flax import nnx
from jax import lax
from tqdm import tqdm

from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.kv_cache import DecoderCache
from tpuspec.measurement import SpeculationStats
from tpuspec.sampling import SamplingParams
from tpuspec.t5 import T5
from tpuspec.vocabulary import Vocabulary

ALPHA_SOURCES = 200


@functools.partial(jax.jit, static_argnames=("graphdef", "steps"))
def generate(graphdef, params, source, source_lengths, key, temperature, *, steps):
    """[B, steps] ids of a batch: greedy at temperature 0, else sampled."""
    model = nnx.merge(graphdef, params)
    rows = source.shape[0]
    pairs = model.cross_keys_values(model.encode(source, source_lengths))
    cache = DecoderCache.zeros(model.config, slots=rows, positions=steps,
                               source_positions=source.shape[1], dtype=jnp.float32)
    cache = dataclasses.replace(cache, cross_k=tuple(k for k, _ in pairs),
                                cross_v=tuple(v for _, v in pairs))
    pad = jnp.arange(model.config.vocab_size) >= demo_data.PIECES

    def body(state):
        i, tokens, done, out, cache = state
        logits, cache = model.decode(tokens, jnp.broadcast_to(i, (rows,)), source_lengths, cache)
        logits = jnp.where(pad[None], -jnp.inf, logits[:, 0])
        noise = jax.random.gumbel(jax.random.fold_in(key, i), logits.shape)
        token = jnp.argmax(logits + temperature * noise, axis=-1).astype(jnp.int32)
        token = jnp.where(done, 0, token)
        out = lax.dynamic_update_slice(out, token[:, None], (0, i))
        return i + 1, token[:, None], done | (token == 1), out, cache

    state = (jnp.int32(0), jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, bool),
             jnp.zeros((rows, steps), jnp.int32), cache)
    return lax.while_loop(lambda s: (s[0] < steps) & ~s[2].all(), body, state)[3]


def generate_all(graphdef, params, sources, *, temperature=0.0, seed=0, rows=128,
                 progress="generate"):
    """Ids (with EOS) for every source, batched by length."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    outputs: list[list[int]] = [[] for _ in sources]
    for j in tqdm(range(0, len(order), rows), desc=progress, disable=None):
        members = order[j:j + rows]
        size = demo_data.width(max(len(sources[i]) for i in members))
        batch = demo_data.collate([sources[i] for i in members], [[] for _ in members],
                                  size, rows)
        ids = np.asarray(generate(
            graphdef, params, batch.source, batch.source_lengths, jax.random.key(seed + j),
            jnp.float32(temperature), steps=64 if size > 32 else 2 * size))
        for i, row in zip(members, ids, strict=False):
            end = np.flatnonzero(row == 1)
            outputs[i] = row[:end[0] + 1].tolist() if end.size else row.tolist()
    return outputs


def scores(processor, graphdef, params, examples) -> dict[str, float]:
    """BLEU and chrF of ``translate``, exact match of ``restore``, greedy."""
    result = {}
    for task, rows in examples.items():
        ids = generate_all(graphdef, params, demo_data.encode(
            processor, [e.source for e in rows]), progress=f"score {task}")
        texts = [processor.decode([i for i in row if i > 1]) for row in ids]
        if task == "translate":
            most = max(len(e.references) for e in rows)
            streams = [[e.references[k] if k < len(e.references) else None for e in rows]
                       for k in range(most)]
            result["bleu"] = sacrebleu.corpus_bleu(texts, streams).score
            result["chrf"] = sacrebleu.corpus_chrf(texts, streams).score
        else:
            result["exact_match"] = 100 * float(np.mean(
                [t == e.references[0] for t, e in zip(texts, rows, strict=True)]))
    return {k: round(v, 2) for k, v in result.items()}


def acceptance(target: T5, draft: T5, vocabulary: Vocabulary,
               tasks: dict[str, list[demo_data.Example]]) -> dict[str, float]:
    """α (accepted / examined) by task at temperature 0 and 1, on ALPHA_SOURCES each."""
    config = EngineConfig(slots=4, source_buckets=(64,), max_target_length=64,
                          draft_lengths=(0, 3), draft_length=3)
    engine = Engine(target, draft, config, vocabulary_size=vocabulary.size)
    engine.compile()
    result = {}
    for task, rows in tasks.items():
        sources = [vocabulary.encode(e.source)
                   for e in rows[::max(1, len(rows) // ALPHA_SOURCES)]]
        for temperature in (0.0, 1.0):
            stats = SpeculationStats()
            for first in range(0, len(sources), config.slots):
                for slot, source in enumerate(sources[first:first + config.slots]):
                    engine.insert(slot, source, seed=first + slot, eos_ids=(1,),
                                  sampling=SamplingParams(temperature=temperature),
                                  max_new_tokens=64, draft_length=3)
                while engine.active_slots:
                    output = engine.step().read()
                    for slot in range(config.slots):
                        stats += SpeculationStats.of_slot(output, slot)
            result[f"{task} at temperature {temperature:g}"] = round(stats.alpha or 0.0, 3)
    return result
