"""Endings, slots, caches and counts of the engine, each test named after a fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import LONG, SMALL, TINY, Job, engine_with, run, solo
from flax import nnx
from programmable import anti, chain_config, count, fixed, rand, recast

from tpuspec.config import EngineConfig
from tpuspec.decode_state import FinishReason
from tpuspec.engine import Engine
from tpuspec.kv_cache import DecoderCache
from tpuspec.sampling import SamplingParams
from tpuspec.speculative_step import read
from tpuspec.t5 import T5

pytestmark = pytest.mark.usefixtures("quick_compilation")

SINGLE = dataclasses.replace(TINY, slots=1, source_buckets=(41,))
GREEDY, RANDOM = SamplingParams(), SamplingParams(temperature=1.0)
RAND = dict(vocab=48)


def rand_draft(kind: str) -> T5:
    return {"copy": lambda: rand(0, **RAND), "noisy": lambda: rand(0, noise=0.05, **RAND),
            "unrelated": lambda: rand(5, **RAND)}[kind]()


def rand_jobs(n: int, **fields) -> list[Job]:
    """Jobs with different sources; ids differ from row to row."""
    rng = np.random.default_rng(3)
    return [Job(source=[*rng.integers(3, 48, size).tolist(), 1], eos_ids=(), seed=i, **fields)
            for i, size in zip(range(n), (1, 6, 12, 40, 5, 30, 2, 9), strict=False)]


# ---- endings and limits ------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
@pytest.mark.parametrize("n", range(1, 12))
def test_eos_accepted_in_the_middle_of_a_block(n, sampling):
    model = count({0: 1, 1: 20} if n == 1 else {n + 1: 1, 1: 20})
    result = solo(engine_with(model, model, LONG), Job(sampling=sampling))
    assert result.ids == [*range(3, n + 2), 1]
    assert result.finish == FinishReason.EOS
    assert result.stats.emitted == n


def test_rows_end_at_different_places_of_one_batch():
    """Finished rows are inert; the others go on, and freed slots are usable at once."""
    model = count({30: 1, 1: 20})
    engine = engine_with(model, model, LONG)
    jobs = [Job(eos_ids=(4,)), Job(eos_ids=(5,)), Job(eos_ids=(11,)), Job(), Job(eos_ids=(9,))]
    for k in (0, 4):
        ran = run(engine, [dataclasses.replace(j, draft_length=k) for j in jobs[:4]])
        assert [r.ids for r in ran] == [[3, 4], [3, 4, 5], [*range(3, 12)], [*range(3, 31), 1]]
        assert run(engine, jobs[4:])[0].ids == [*range(3, 10)]


@pytest.mark.parametrize(("eos", "cap", "ids", "finish"), [
    (5, 5, [3, 4, 5], FinishReason.EOS), (7, 5, [3, 4, 5, 6, 7], FinishReason.EOS),
    (8, 5, [3, 4, 5, 6, 7], FinishReason.LENGTH)])
def test_the_earliest_of_stop_and_length_cap_wins(eos, cap, ids, finish):
    model = count()
    for k in range(9):
        result = solo(engine_with(model, model, LONG),
                      Job(eos_ids=(eos,), max_new_tokens=cap, draft_length=k))
        assert (result.ids, result.finish) == (ids, finish)


def test_budget_never_goes_negative_near_the_limit():
    model = count()
    engine = engine_with(model, model, LONG)
    limit = LONG.max_target_length
    for k in range(9):
        results = run(engine, [Job(max_new_tokens=m, eos_ids=(), draft_length=k)
                               for m in (limit - 1, limit, limit, 1)])
        assert [len(r.ids) for r in results] == [limit - 1, limit, limit, 1]
        assert all(r.finish == FinishReason.LENGTH for r in results)
    with pytest.raises(ValueError, match=r"max_new_tokens must be in \[1, 32\], got 33"):
        engine.insert(0, [1], sampling=GREEDY, seed=0, max_new_tokens=limit + 1, eos_ids=(),
                      draft_length=0)


@pytest.mark.parametrize("k", range(9))
def test_no_eos_or_several(k):
    model = count({6: 1, 1: 9})
    engine = engine_with(model, model, LONG)
    ends = {(): [3, 4, 5, 6, 1, 9, 10, 11], (1,): [3, 4, 5, 6, 1], (9,): [3, 4, 5, 6, 1, 9],
            (1, 9): [3, 4, 5, 6, 1]}
    for eos_ids, ids in ends.items():
        assert solo(engine, Job(eos_ids=eos_ids, max_new_tokens=8, draft_length=k)).ids == ids


# ---- cache, rollback, slots --------------------------------------------------


def teacher_forced_greedy(model: T5, job: Job) -> list[int]:
    """The oracle: the whole sequence again for every token, no cache."""
    source = jnp.asarray([list(job.source)])
    length = jnp.asarray([len(job.source)])
    encoded = model.encode(source, length)
    steps = job.max_new_tokens

    def body(i, tokens):
        logits = model.decode_teacher_forced(tokens, encoded, length)
        return tokens.at[0, i + 1].set(jnp.argmax(logits[0, i]).astype(jnp.int32))

    tokens = jax.lax.fori_loop(0, steps, body, jnp.zeros((1, steps + 1), jnp.int32))
    return np.asarray(tokens)[0, 1:].tolist()


@pytest.mark.parametrize("kind", ["copy", "noisy", "unrelated"])
def test_windows_at_the_end_of_the_cache_are_not_shifted_back(kind):
    """Ids up to the very last position equal decoding without a cache, solo and batched."""
    target = rand(0, **RAND)
    engine = engine_with(target, rand_draft(kind))
    jobs = rand_jobs(4, max_new_tokens=SMALL.max_target_length)
    oracle = [teacher_forced_greedy(target, job) for job in jobs]
    assert [r.ids for r in run(engine, jobs)] == oracle
    assert [solo(engine, job, 2).ids for job in jobs] == oracle
    engine = engine_with(target, rand_draft(kind), SINGLE)
    assert [solo(engine, job).ids for job in jobs] == oracle
    engine = engine_with(target, rand_draft(kind))
    plain = run(engine, [dataclasses.replace(j, draft_length=0) for j in jobs])
    assert [r.ids for r in plain] == oracle
    if kind == "copy":
        assert all(r.stats.alpha == 1 for r in run(engine, jobs))


def test_live_rows_are_untouched_by_empty_slots_full_of_nan():
    target = rand(0, **RAND)
    engine = engine_with(target, rand_draft("noisy"))
    jobs = rand_jobs(3, sampling=RANDOM)
    alone = [solo(engine, job).ids for job in jobs]
    poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan),
                          (engine._state.target_cache, engine._state.draft_cache))
    for slots in ([0, 1, 2], [1, 2, 3], [3, 0, 2]):
        engine._state = dataclasses.replace(
            engine._state, target_cache=poison[0], draft_cache=poison[1])
        engine._sources.clear()  # what slots hold is not theirs any more
        poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), poison)
        assert [r.ids for r in run(engine, jobs, slots)] == alone


def test_a_new_request_does_not_see_the_previous_tenant_of_its_slot():
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    long, short = rand_jobs(4)[3], rand_jobs(1)[0]
    fresh = {id(j): solo(engine_with(rand(0, **RAND), rand_draft("noisy")), j).ids
             for j in (long, short)}
    for job in (long, short, long):
        assert solo(engine, job).ids == fresh[id(job)]
    engine.insert(0, long.source, sampling=GREEDY, seed=0, max_new_tokens=32, eos_ids=(),
                  draft_length=4)
    in_flight = engine.step()
    engine.release(0)
    assert solo(engine, short).ids == fresh[id(short)]
    in_flight.read()


def test_source_that_a_slot_still_holds_is_not_encoded_again(monkeypatch):
    """Samples of one source, a request that comes again, and what others have overwritten."""
    def engine() -> Engine:
        return engine_with(rand(0, **RAND), rand_draft("noisy"))

    samples = [dataclasses.replace(rand_jobs(4)[3], sampling=RANDOM, seed=i) for i in range(4)]
    other = rand_jobs(3)[2]
    alone = [solo(engine(), job).ids for job in samples]
    assert len(set(map(tuple, alone))) == 4
    it, ran = engine(), []
    program = it._run
    monkeypatch.setattr(it, "_run", lambda key, *args: (ran.append(key[0]), program(key, *args))[1])

    def entered() -> list[str]:
        found = [name for name in ran if name in ("insert", "copy")]
        ran.clear()
        return found

    assert [r.ids for r in run(it, samples)] == alone
    assert entered() == ["insert", "copy", "copy", "copy"]
    assert solo(it, samples[1], slot=0).ids == alone[1]  # in a slot that holds it itself
    it.insert(3, samples[0].source, sampling=RANDOM, seed=9, max_new_tokens=32, eos_ids=(),
              draft_length=4)
    it.step().read()
    it.release(3)  # and one that was left in the middle
    assert solo(it, samples[2], slot=3).ids == alone[2]
    assert entered() == ["copy"] * 3
    run(it, [other] * 4)
    assert entered() == ["insert", "copy", "copy", "copy"]
    assert [r.ids for r in run(it, samples, [3, 0, 2, 1])] == alone
    assert entered() == ["insert", "copy", "copy", "copy"]


@pytest.mark.parametrize("layout", [{}, dict(tiled=True), dict(tiled=True, stacked=True)], ids=str)
def test_copied_source_touches_one_slot_in_every_layout_of_the_cache(layout):
    config = chain_config(d_kv=64, num_heads=2, num_decoder_layers=2)
    cache = DecoderCache.zeros(config, slots=3, positions=4, source_positions=4,
                               dtype=jnp.float32, **layout)
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)
    copied = cache.copy_source(jnp.int32(2), jnp.int32(0))
    for name in ("self_k", "self_v", "cross_k", "cross_v"):
        for before, after in zip(getattr(cache, name), getattr(copied, name), strict=True):
            before, after = (np.moveaxis(np.asarray(x), x.ndim - 4, 0) for x in (before, after))
            expected = before[2] if name.startswith("cross") else np.zeros_like(before[0])
            np.testing.assert_array_equal(after[0], expected)
            np.testing.assert_array_equal(after[1:], before[1:])


def test_a_late_result_of_a_dead_request_does_not_end_its_successor():
    """The in-flight step's finish belongs to the request it was launched with."""
    engine = engine_with(count({3: 1}), anti(), LONG)

    def insert(eos_ids):
        engine.insert(0, [1], sampling=GREEDY, seed=0, max_new_tokens=32, eos_ids=eos_ids,
                      draft_length=1)

    insert((3,))
    old = engine.step()
    engine.release(0)
    insert(())
    assert old.read().finish[0] == FinishReason.EOS
    assert engine.active_slots == (0,)


def test_many_mixed_requests_equal_their_solo_runs():
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    rng = np.random.default_rng(0)
    mixed = [GREEDY, RANDOM, SamplingParams(temperature=0.7, top_k=5, top_p=0.9)]
    jobs = [Job(source=[*rng.integers(3, 48, rng.integers(0, 40)).tolist(), 1],
                sampling=mixed[i % 3],
                seed=int(rng.integers(2**63)), max_new_tokens=int(rng.integers(1, 33)),
                eos_ids=(1, 7), draft_length=int(rng.integers(0, 5)), start=i // 3)
            for i in range(40)]
    together = run_queue(engine, jobs)
    assert together == [solo(engine, job).ids for job in jobs]


def run_queue(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Continuous batching by hand: each job takes the first free slot."""
    free, ids, owner, queue = [0, 1, 2, 3], [[] for _ in jobs], {}, list(range(len(jobs)))
    while queue or owner:
        while free and queue:
            j = queue.pop(0)
            slot = free.pop(0)
            owner[slot] = j
            job = jobs[j]
            engine.insert(slot, job.source, sampling=job.sampling, seed=job.seed,
                          max_new_tokens=job.max_new_tokens, eos_ids=job.eos_ids,
                          draft_length=job.draft_length)
        output = engine.step().read()
        for slot, j in list(owner.items()):
            ids[j] += output.tokens[slot, :output.num_tokens[slot]].tolist()
            if output.finish[slot]:
                free.append(slot)
                del owner[slot]
    return ids


def test_plain_rows_beside_speculative_ones_leave_no_draft_cache_behind():
    model = rand(0, **RAND)
    engine = engine_with(model, rand_draft("copy"))
    plain, fast = (dataclasses.replace(j, draft_length=k)
                   for j, k in zip(rand_jobs(2), (0, 4), strict=True))
    results = run(engine, [plain, fast])
    assert results[0].stats.drafted == 0 and results[1].stats.alpha == 1
    assert results[0].ids == solo(engine, plain).ids


def test_encoder_and_decoder_capacities_are_independent():
    target, draft = rand(0, **RAND), rand_draft("noisy")
    job = rand_jobs(4, max_new_tokens=6)[3]
    wide = solo(engine_with(target, draft), job).ids
    narrow = dataclasses.replace(SINGLE, max_target_length=6, draft_lengths=(0,), draft_length=0)
    assert solo(engine_with(target, None, narrow), job).ids == wide
    changed = dataclasses.replace(job, source=[*job.source[:-1], 9])
    logits = [encoder_logits(target, j) for j in (job, changed)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


def encoder_logits(model: T5, job: Job) -> np.ndarray:
    length = jnp.asarray([len(job.source)])
    encoded = model.encode(jnp.asarray([list(job.source)]), length)
    return np.asarray(model.decode_teacher_forced(jnp.zeros((1, 1), jnp.int32), encoded, length))


# ---- sampling ----------------------------------------------------------------


def test_a_seeded_request_does_not_depend_on_neighbours_slot_or_arrival():
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    job, *others = (dataclasses.replace(j, sampling=RANDOM, seed=42 + i)
                    for i, j in enumerate(rand_jobs(4)))
    greedy = dataclasses.replace(others[0], sampling=GREEDY)
    alone, greedy_alone = solo(engine, job).ids, solo(engine, greedy).ids
    assert run(engine, [job, greedy, others[1], others[2]])[0].ids == alone
    late = run(engine, [greedy, *others[1:], dataclasses.replace(job, start=3)], [2, 0, 1, 3])
    assert late[3].ids == alone and late[0].ids == greedy_alone
    assert solo(engine, dataclasses.replace(job, seed=43)).ids != alone


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_the_tokenizer_does_not_have_are_never_sampled(temperature):
    """Padded rows of the vocabulary are the largest logits of target and draft."""
    p = {5: 1e-3, 6: 2e-3, 30: 0.5, 31: 0.497}
    engine = engine_with(fixed(p), fixed({5: 1e-3, 31: 0.999}), TINY, vocabulary_size=30)
    for k in (0, 4):
        ids = sum((r.ids for r in run(engine, [Job(
            sampling=SamplingParams(temperature=temperature), seed=i, eos_ids=(),
            draft_length=k) for i in range(4)])), [])
        assert max(ids) < 30
        if temperature == 0:
            assert set(ids) == {6}


@pytest.mark.parametrize("rows", [(48, 32), pytest.param((32, 48), marks=pytest.mark.slow)])
def test_vocabularies_that_differ_only_by_padding(rows):
    """Of target and draft, over 30 real ids."""
    p, q = {5: 0.5, 6: 0.3, 7: 0.2}, {5: 0.2, 6: 0.3, 7: 0.5}
    engine = engine_with(fixed(p, rows[0]), fixed(q, rows[1]), TINY, 30)
    jobs = [Job(sampling=RANDOM, seed=i, eos_ids=()) for i in range(4)]
    ids = sum((r.ids for seed in range(0, 400, 4) for r in run(engine, [
        dataclasses.replace(j, seed=seed + j.seed) for j in jobs])), [])
    found = np.bincount(ids, minlength=48) / len(ids)
    np.testing.assert_allclose(found[5:8], [0.5, 0.3, 0.2], atol=0.015)
    assert found[5:8].sum() == pytest.approx(1)
    assert set(solo(engine, Job(eos_ids=())).ids) == {5}


def test_non_finite_weights_end_the_request_and_spare_its_neighbours():
    model = rand(0, **RAND)
    engine = engine_with(model, rand_draft("copy"))
    bad, good = rand_jobs(2)
    expected = solo(engine, good).ids
    engine.insert(0, bad.source, sampling=GREEDY, seed=0, max_new_tokens=32, eos_ids=(),
                  draft_length=4)
    cache = engine._state.target_cache
    poisoned = cache.cross_v[0].at[0].set(jnp.nan)
    engine._state = dataclasses.replace(engine._state, target_cache=dataclasses.replace(
        cache, cross_v=(poisoned, *cache.cross_v[1:])))
    engine.insert(1, good.source, sampling=GREEDY, seed=0, max_new_tokens=32, eos_ids=(),
                  draft_length=4)
    output = engine.step().read()
    assert output.finish[0] == FinishReason.NON_FINITE and output.num_tokens[0] == 0
    assert engine.active_slots == (1,)
    ids = output.tokens[1, :output.num_tokens[1]].tolist()
    while engine.active_slots:
        output = engine.step().read()
        ids += output.tokens[1, :output.num_tokens[1]].tolist()
    assert ids == expected


# ---- counts ------------------------------------------------------------------


def test_acceptance_figures_by_hand():
    model = count({11: 1})
    # 3..11 and EOS: two full blocks.
    stats = solo(engine_with(model, model, LONG), Job()).stats
    assert (stats.steps, stats.drafted, stats.accepted, stats.examined, stats.emitted) == (
        2, 8, 8, 8, 10)
    assert stats.alpha == 1 and stats.overlap == pytest.approx(8)
    stats = solo(engine_with(model, anti(), LONG), Job()).stats
    assert (stats.steps, stats.drafted, stats.accepted, stats.examined, stats.emitted) == (
        10, 40, 0, 10, 10)
    assert stats.alpha == 0 and stats.draft_acceptance_rate == 0


def test_drafts_cut_by_the_cap_were_never_judged():
    model = count()
    stats = solo(engine_with(model, model, LONG), Job(max_new_tokens=3, eos_ids=())).stats
    assert (stats.steps, stats.drafted, stats.accepted, stats.examined, stats.emitted) == (
        1, 4, 3, 3, 3)


def test_measured_overlap_is_the_closed_form():
    p, q = {5: 0.5, 6: 0.3, 7: 0.2}, {5: 0.2, 6: 0.3, 7: 0.5}
    engine = engine_with(fixed(p), fixed(q), LONG)
    stats = solo(engine, Job(sampling=RANDOM, eos_ids=())).stats
    assert stats.alpha_overlap == pytest.approx(0.7, abs=1e-5)


# ---- programs ----------------------------------------------------------------


def test_nothing_compiles_after_warm_up():
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    run(engine, rand_jobs(4))
    before = engine.compilations
    for size in (1, 7, 8, 9, 63, 64):
        for live in (1, 4):
            for sampling in (GREEDY, RANDOM, SamplingParams(temperature=1, top_k=3, top_p=0.5)):
                jobs = [Job(source=[3] * (size - 1) + [1], sampling=sampling, seed=i,
                            max_new_tokens=3 + i, draft_length=(size + i) % 5)
                        for i in range(live)]
                run(engine, jobs)
    assert engine.compilations == before


@pytest.mark.parametrize("slots", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_in_bfloat16_greedy_output_does_not_depend_on_the_draft_length(slots):
    """Every target pass has one width, so plain decoding computes what a verify pass does."""
    target = recast(rand(0, **RAND), jnp.bfloat16)
    draft = recast(rand_draft("noisy"), jnp.bfloat16)
    engine = engine_with(target, draft, dataclasses.replace(TINY, slots=slots))
    for job in rand_jobs(4, max_new_tokens=TINY.max_target_length):
        job = dataclasses.replace(job, source=job.source[-8:])
        ran = [solo(engine, dataclasses.replace(job, draft_length=k)) for k in (0, 2, 4)]
        assert [r.ids for r in ran[1:]] == [ran[0].ids] * 2
        assert ran[2].stats.accepted > 0


def test_buffers_are_donated_not_copied():
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    engine.insert(0, [1], sampling=GREEDY, seed=0, max_new_tokens=8, eos_ids=(), draft_length=4)
    buffer = engine._state.target_cache.self_k[0]
    engine.step().read()
    assert buffer.is_deleted()
    assert not any(weight.is_deleted() for model in engine._weights for weight in model)


def test_warm_up_measures_every_rung_and_says_how():
    """The passes that c and the widening compare are programs of their own."""
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"), SINGLE)
    said = []
    cost = engine.measure(lambda *what: said.append(what))
    assert said[-1] == ("compile", 3, 3)
    assert set(cost.verify_ms) == set(cost.step_ms) == {0, 4}
    assert cost.c is not None and 0 < cost.c < 50 and cost.widening(0) == 1
    assert "1 slots" in cost.method


def test_a_step_before_warm_up_or_without_requests_is_refused():
    model = rand(0, **RAND)
    engine = Engine(model, None, EngineConfig(slots=1, source_buckets=(8,), draft_lengths=(0,),
                                              draft_length=0), vocabulary_size=48)
    with pytest.raises(RuntimeError, match="warm_up"):
        engine.insert(0, [1], sampling=GREEDY, seed=0, max_new_tokens=1, eos_ids=(),
                      draft_length=0)
    with pytest.raises(RuntimeError, match="active slot"):
        engine.step()


@pytest.mark.parametrize(("change", "message"), [
    (dict(source=[]), r"length of source must be in \[1, 64\], got 0"),
    (dict(source=[1] * 65), r"length of source must be in \[1, 64\], got 65"),
    (dict(source=[48]), r"source id must be in \[0, 47\], got 48"),
    (dict(eos_ids=[1] * 9), r"number of eos_ids must be in \[0, 8\], got 9"),
    (dict(seed=-1), "seed must be in"), (dict(draft_length=5), r"draft_length must be in \[0, 4\]"),
    (dict(slot=4), r"slot must be in \[0, 3\], got 4")])
def test_bad_requests_name_field_value_and_bound(change, message):
    engine = engine_with(rand(0, **RAND), rand_draft("noisy"))
    fields = dict(slot=0, source=[1], sampling=GREEDY, seed=0, max_new_tokens=1, eos_ids=[],
                  draft_length=0) | change
    with pytest.raises(ValueError, match=message):
        engine.insert(**fields)
    assert not engine.active_slots


def test_a_window_of_many_positions_equals_single_steps_at_row_offsets():
    """Relative bias and causal mask of a window at different offsets per row."""
    model = rand(0, **RAND)
    engine = engine_with(model, rand_draft("copy"))
    slots = dataclasses.replace(engine._state.slots, length_B=jnp.asarray([1, 4, 9, 2]),
                                source_length_B=jnp.asarray([1, 2, 3, 4]))
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
                         engine._state.target_cache)
    window = jnp.asarray(rng.integers(3, 48, (4, 5)), jnp.int32)
    graph, params = nnx.split(model)
    decode = jax.jit(lambda params, tokens, start, cache: read(
        nnx.merge(graph, params), tokens, start, slots, cache, 8))
    whole, after = decode(params, window, slots.length_B - 1, cache)
    for i in range(5):
        one, cache = decode(params, window[:, i:i + 1], slots.length_B - 1 + i, cache)
        np.testing.assert_allclose(one[:, 0], whole[:, i], atol=1e-4)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
