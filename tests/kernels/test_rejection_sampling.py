"""The kernel, interpreted, against a sorting float64 oracle, the plain reference and the
theorem."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracle
from jax.experimental.pallas import tpu as pltpu
from scipy import stats

from tpuspec.kernels import (
    SamplingBlocks,
    WarpedRows,
    WarpOptions,
    rejection_sample,
    rejection_sampling,
    sample_tokens,
    vocabulary_tiles,
)
from tpuspec.kernels.rejection_sampling_pallas import rejection_vmem
from tpuspec.kernels.sampling_reference import draw, warp

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, G, V, VOCABULARY = 192, 5, 400, 390
γ = G - 1
# Interpreted kernels are many small operations: what takes long is to compile them.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def kernel(vocabulary_size=VOCABULARY, interpret=True, blocks=None):
    return jax.jit(functools.partial(rejection_sample, vocabulary_size=vocabulary_size,
                                     implementation="pallas", interpret=interpret, blocks=blocks),
                   compiler_options=QUICK_TO_COMPILE)


@functools.cache
def reference(vocabulary_size=VOCABULARY):
    return jax.jit(functools.partial(rejection_sample, vocabulary_size=vocabulary_size,
                                     implementation="xla"))


@pytest.fixture(autouse=True)
def _loops_over_tiles_turn_at_these_sizes(monkeypatch):
    monkeypatch.setattr(vocabulary_tiles, "TILES_PER_TURN", 2)


def mixed_options(rng, slots) -> WarpOptions:
    return WarpOptions(
        temperature_B=rng.choice([0.0, 0.3, 1.0, 1.0, 2.0], slots).astype(np.float32),
        top_k_B=rng.choice([0, 0, 1, 10, 200, 10**6], slots).astype(np.int32),
        top_p_B=rng.choice([1.0, 1.0, 0.9, 0.5, 0.05], slots).astype(np.float32),
        min_p_B=rng.choice([0.0, 0.0, 0.02, 0.5], slots).astype(np.float32))


def case(seed, slots=SLOTS, positions=G, size=V, vocabulary_size=VOCABULARY, spread=3.0, **fixed):
    """Arguments with drafts that were drawn from the draft's distributions."""
    rng = np.random.default_rng(seed)
    draft_logits = rng.normal(0, spread, (slots, positions - 1, size)).astype(np.float32)
    target_logits = rng.normal(0, spread, (slots, positions, size)).astype(np.float32)
    target_logits[:, :-1] = draft_logits + rng.normal(0, 0.7, draft_logits.shape)
    coins = rng.random((3, slots, positions), np.float32)
    arguments = {
        "draft_logits_BγV": draft_logits, "target_logits_BGV": target_logits,
        "options": mixed_options(rng, slots), "active_B": np.ones(slots, bool),
        "limit_B": rng.integers(0, positions, slots).astype(np.int32),
        "accept_uniforms_Bγ": coins[1, :, :-1], "next_uniforms_BG": coins[2]} | fixed
    q, rows, _ = warped(arguments["draft_logits_BγV"], arguments["options"], vocabulary_size)
    drafts = drawn(q.reshape(-1, size), coins[0, :, :-1].reshape(-1)).reshape(slots, -1)
    return jax.tree.map(jnp.asarray, {
        "drafts_Bγ": drafts, "draft_rows_Bγ": rows} | arguments)


warped = jax.jit(warp, static_argnums=2)
drawn = jax.jit(draw)


def assert_same(actual, expected, where=slice(None)):
    for field in ("accepted_B", "next_token_B", "sound_B"):
        np.testing.assert_array_equal(getattr(actual, field)[where],
                                      getattr(expected, field)[where], err_msg=field)
    np.testing.assert_allclose(actual.overlap_Bγ[where], expected.overlap_Bγ[where], atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_decides_as_sorting_does(seed):
    arguments = case(seed)
    actual = kernel()(**arguments)
    check_with_oracle(arguments, actual, VOCABULARY)


def check_with_oracle(arguments, actual, vocabulary_size, least_certain=0.95):
    a = jax.tree.map(np.asarray, arguments)
    certain = 0
    for b in range(len(a["limit_B"])):
        options = [float(x[b]) for x in a["options"]]
        options[1] = int(options[1])
        p, p_margins = zip(*(sampling_oracle.warp(x, *options, vocabulary_size)
                             for x in a["target_logits_BGV"][b].copy()), strict=True)
        q, q_margins = zip(*(sampling_oracle.warp(x, *options, vocabulary_size)
                             for x in a["draft_logits_BγV"][b].copy()), strict=True)
        n, token, margin = sampling_oracle.accept(
            np.stack(p), np.stack(q), a["drafts_Bγ"][b], a["limit_B"][b],
            a["accept_uniforms_Bγ"][b].astype(np.float64),
            a["next_uniforms_BG"][b].astype(np.float64))
        if min(margin, *p_margins, *q_margins) < sampling_oracle.ROUNDING:
            continue
        certain += 1
        assert (actual.accepted_B[b], actual.next_token_B[b]) == (n, token), (b, options)
        np.testing.assert_allclose(actual.overlap_Bγ[b], np.minimum(p[:-1], q).sum(-1), atol=1e-5)
    assert certain > least_certain * len(a["limit_B"])
    assert actual.sound_B.all()


OPTIONS = [(0.8, 0, 1.0, 0.0), (1.0, 12, 0.9, 0.0), (1.5, 0, 0.6, 0.05)]


@pytest.mark.parametrize("option", OPTIONS)
def test_the_first_token_has_exactly_the_targets_distribution(option):
    rng = np.random.default_rng(0)
    q_logits = rng.normal(0, 1.5, 40)
    p_logits = q_logits + rng.normal(0, 1, 40)
    at = rng.permutation(VOCABULARY)[:40]  # in all four tiles

    def rows(logits, count):
        whole = np.full((SLOTS, count, V), -30.0, np.float32)
        whole[..., at] = logits
        return whole

    options = WarpOptions(*(np.full(SLOTS, x, dtype) for x, dtype in zip(
        option, (np.float32, np.int32, np.float32, np.float32), strict=True)))
    p, _ = sampling_oracle.warp(rows(p_logits, 1)[0, 0], *option, VOCABULARY)
    q, _ = sampling_oracle.warp(rows(q_logits, 1)[0, 0], *option, VOCABULARY)
    counts, overlap, accepted, repeats = np.zeros(V), [], [], 8
    for seed in range(repeats):
        arguments = case(seed, options=options, draft_logits_BγV=rows(q_logits, γ),
                         target_logits_BGV=rows(p_logits, G), limit_B=np.full(SLOTS, γ, np.int32))
        result = kernel()(**arguments)
        n = np.asarray(result.accepted_B)
        first = np.where(n > 0, arguments["drafts_Bγ"][:, 0], result.next_token_B)
        counts += np.bincount(first, minlength=V)
        accepted.append(n > 0)
        overlap.append(result.overlap_Bγ)
    live = p > 0
    assert not counts[~live].any()
    assert stats.chisquare(counts[live], p[live] * counts.sum()).pvalue > 1e-3
    np.testing.assert_allclose(np.stack(overlap), np.minimum(p, q).sum(), atol=1e-5)
    error = np.sqrt(0.25 / np.size(accepted))
    assert abs(np.mean(accepted) - np.minimum(p, q).sum()) < 4 * error


def test_what_is_not_a_number_stays_in_its_slot_and_is_reported():
    arguments = case(20, limit_B=np.full(SLOTS, γ, np.int32))
    clean = kernel()(**arguments)
    reached = np.asarray(clean.accepted_B)
    target = np.asarray(arguments["target_logits_BGV"]).copy()
    harmed = np.arange(SLOTS) % 3 == 0
    spoilt_row = np.where(np.arange(SLOTS) % 2 == 0, np.minimum(reached, γ), G - 1)
    for b in np.flatnonzero(harmed):
        target[b, spoilt_row[b], b % VOCABULARY] = (np.nan, np.inf)[b // 6 % 2]
    spoilt = arguments | {"target_logits_BGV": jnp.asarray(target)}
    for sample in (kernel(), reference()):
        result = sample(**spoilt)
        # A row that was not reached does not matter.
        np.testing.assert_array_equal(result.sound_B, ~(harmed & (spoilt_row <= reached)))
        assert_same(result, clean, np.asarray(result.sound_B))
    # What ids that do not exist hold does not matter either.
    spoilt = arguments | {"target_logits_BGV": arguments["target_logits_BGV"].at[
        ..., VOCABULARY:].set(jnp.nan)}
    assert_same(kernel()(**spoilt), clean)


def test_slots_that_are_not_active_are_inert():
    arguments = case(30)
    clean = kernel()(**arguments)
    active = np.arange(SLOTS) % 4 > 0
    active[:3] = False  # also before the first that is
    dead = {name: jnp.where(active[:, None, None], arguments[name], jnp.nan)
            for name in ("target_logits_BGV", "draft_logits_BγV")}
    for sample in (kernel(), reference()):
        result = sample(**arguments | dead | {"active_B": jnp.asarray(active)})
        assert_same(result, clean, active)
        assert result.sound_B.all()
        for figure in (result.accepted_B, result.next_token_B, result.overlap_Bγ):
            assert not np.asarray(figure)[~active].any()


def test_a_draft_of_target_probability_zero_is_not_accepted_by_a_coin_of_zero():
    """The target's one id is not among the draft's, and coins are 0 or just below 1."""
    arguments = case(
        40, options=WarpOptions(
            np.ones(SLOTS, np.float32), np.full(SLOTS, 1, np.int32), np.ones(SLOTS, np.float32),
            np.zeros(SLOTS, np.float32)),
        accept_uniforms_Bγ=np.zeros((SLOTS, γ), np.float32), limit_B=np.full(SLOTS, γ, np.int32),
        next_uniforms_BG=np.full((SLOTS, G), 1 - 2**-24, np.float32))
    only = np.asarray(arguments["target_logits_BGV"])[..., :VOCABULARY].argmax(-1)
    n = (np.asarray(arguments["drafts_Bγ"]) == only[:, :-1]).cumprod(axis=1).sum(axis=1)
    for sample in (kernel(), reference()):
        result = sample(**arguments)
        np.testing.assert_array_equal(result.accepted_B, n)
        np.testing.assert_array_equal(result.next_token_B, only[np.arange(SLOTS), n])


def test_greedy_ties_go_to_the_lowest_id_and_every_tile_counts():
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, (SLOTS, G, V)).astype(np.float32)
    target[: SLOTS // 2] = 0
    options = WarpOptions(np.zeros(SLOTS, np.float32), np.zeros(SLOTS, np.int32),
                          np.ones(SLOTS, np.float32), np.zeros(SLOTS, np.float32))
    arguments = case(50, target_logits_BGV=target, options=options,
                     draft_logits_BγV=target[:, :-1], limit_B=np.full(SLOTS, γ, np.int32))
    result = kernel()(**arguments)
    assert (np.asarray(result.accepted_B) == γ).all()
    np.testing.assert_array_equal(result.next_token_B, target[:, -1, :VOCABULARY].argmax(-1))


def test_equal_distributions_accept_everything_and_an_empty_residual_is_the_target():
    same = case(60, limit_B=np.full(SLOTS, γ, np.int32))
    draft = same["draft_logits_BγV"]
    same["target_logits_BGV"] = jnp.concatenate([draft, draft[:, :1]], axis=1)
    # The totals of p and q are summed up in different orders here.
    same["accept_uniforms_Bγ"] = jnp.full((SLOTS, γ), 1 - 1e-6, jnp.float32)
    assert (kernel()(**same).accepted_B == γ).all()
    # Wrong figures of q, twice too large, leave nothing where a coin rejects.
    rows = same["draft_rows_Bγ"]
    twice = WarpedRows(rows.top, rows.threshold, rows.total / 2)
    result = kernel()(**same | {"draft_rows_Bγ": twice})
    sampled = np.asarray(same["options"].temperature_B) > 0
    assert (np.asarray(result.accepted_B)[sampled] == 0).all()
    assert_same(result, reference()(**same | {"draft_rows_Bγ": twice}))


def test_without_drafts_the_kernel_for_single_rows_is_used(monkeypatch):
    used = []

    def spy(*arguments, implementation, interpret, **options):
        used.append(implementation)
        return sample_tokens(*arguments, implementation="xla", **options)

    monkeypatch.setattr(rejection_sampling, "sample_tokens", spy)
    arguments = case(70, active_B=np.arange(SLOTS) > 0)
    for name in ("drafts_Bγ", "draft_logits_BγV", "accept_uniforms_Bγ"):
        arguments[name] = arguments[name][:, :0]
    for name in ("target_logits_BGV", "next_uniforms_BG"):
        arguments[name] = arguments[name][:, :1]
    arguments |= {"draft_rows_Bγ": jax.tree.map(lambda x: x[:, :0], arguments["draft_rows_Bγ"]),
                  "limit_B": jnp.zeros(SLOTS, jnp.int32)}
    actual = jax.jit(functools.partial(rejection_sample, vocabulary_size=VOCABULARY,
                                       implementation="pallas"))(**arguments)
    assert used == ["pallas"]
    assert_same(actual, reference()(**arguments))
    assert actual.overlap_Bγ.shape == (SLOTS, 0)


def test_blocks_of_the_vocabulary_change_nothing():
    """Three blocks of it, the last one shorter, between slots that need none, or no draft's."""
    vocabulary_size, slots = 2200, 24
    arguments = case(80, slots, 3, 2304, vocabulary_size, active_B=np.arange(slots) % 5 > 0)
    cut = kernel(vocabulary_size, blocks=SamplingBlocks(tiles=8))
    assert_same(cut(**arguments), reference(vocabulary_size)(**arguments))


@pytest.mark.parametrize("version", ["TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E"])
@pytest.mark.parametrize("vocabulary_size", [32128, 250112, 256512])
@pytest.mark.parametrize("positions", [2, 8, 16])
def test_rule_of_blocks_holds_for_every_model(version, vocabulary_size, positions):
    chip = getattr(pltpu.ChipVersion, version)
    info = pltpu.get_tpu_info_for_chip(chip, chip.num_physical_tensor_cores_per_chip)
    vmem = rejection_vmem(positions, vocabulary_size)
    if version == "TPU_V4" and vocabulary_size > 32128 and positions > 8:
        with pytest.raises(NotImplementedError, match="VMEM"):
            vmem.blocks(info, vocabulary_size)
        return
    blocks = vmem.blocks(info, vocabulary_size)
    if vocabulary_size == 32128 or positions <= 8:  # only the largest are cut
        assert (blocks.count(vocabulary_size) > 1) == (
            version == "TPU_V4" and vocabulary_size > 32128)
    padded = -(-positions // 8) * 8
    kept, block = (n * 128 * padded * 4 for n in (-(-vocabulary_size // 128), blocks.tiles))
    assert kept + 4 * block <= 0.85 * info.vmem_capacity_bytes
    limit = vmem.limit(blocks) or 16 * 2**20  # without a limit the compiler gives this
    assert kept + 4 * block < limit <= info.vmem_capacity_bytes


@pytest.mark.parametrize("tiles", [0, 4, 19])
def test_blocks_that_do_not_cut_the_vocabulary_are_an_error(tiles):
    with pytest.raises(ValueError, match=rf"all 18 of the vocabulary .* got {tiles}"):
        SamplingBlocks(tiles=tiles).count(2200)


def abstract_case(slots=2, positions=3, size=400):
    f32, i32 = jnp.float32, jnp.int32
    A = jax.ShapeDtypeStruct
    per_draft, per_slot = A((slots, positions - 1), f32), A((slots,), f32)
    return (
        A(per_draft.shape, i32), A((*per_draft.shape, size), f32), WarpedRows(*[per_draft] * 3),
        A((slots, positions, size), f32),
        WarpOptions(per_slot, A((slots,), i32), per_slot, per_slot), A((slots,), i32),
        A((slots,), jnp.bool_), per_draft, A((slots, positions), f32))


@pytest.mark.parametrize(("change", "message"), [
    ({"positions": 17}, "drafts"), ({"vocabulary_size": 500}, "vocabulary"),
    ({"vocabulary_size": 400_000, "size": 400_000}, "VMEM")])
def test_shapes_that_the_kernel_does_not_take(change, message):
    change = dict(change)
    vocabulary_size = change.pop("vocabulary_size", 300)
    chip = jax.sharding.AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Explicit,),
                                     abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(
            rejection_sample, vocabulary_size=vocabulary_size, implementation="pallas"),
            *abstract_case(**change))


def test_the_cpu_takes_plain_jnp_unless_told():
    jaxpr = jax.make_jaxpr(functools.partial(rejection_sample, vocabulary_size=VOCABULARY))(
        *abstract_case())
    assert "pallas_call" not in str(jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "size", "vocabulary_size"), [
    (2, 128, 128), (3, 1025, 1000), (9, 640, 513), (16, 400, 390), (8, 32128, 32100)])
def test_other_shapes_decide_as_sorting_does(positions, size, vocabulary_size):
    for seed in range(2):
        arguments = case(seed, 32, positions, size, vocabulary_size)
        actual = kernel(vocabulary_size)(**arguments)
        # The more ids there are, the closer is the next one that could be decided for.
        check_with_oracle(arguments, actual, vocabulary_size, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "blocks"), [(V, None), (1100, SamplingBlocks(tiles=8))])
def test_no_races_and_no_use_of_memory_that_was_not_written(size, blocks):
    """Two cores; a race raises."""
    arguments = case(90, slots=6, size=size, vocabulary_size=size - 10,
                     active_B=np.arange(6) != 3)
    checked = kernel(size - 10, blocks=blocks, interpret=pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2))
    assert_same(checked(**arguments), reference(size - 10)(**arguments))
