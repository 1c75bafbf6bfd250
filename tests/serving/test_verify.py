"""The tests behind ``tpuspec verify``: a sound engine passes them, broken ones do not."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, engine_with
from programmable import chain, fixed
from sampling_oracle import sequences

from tpuspec import exactness, kernels
from tpuspec.engine import Engine
from tpuspec.kernel_choice import KernelChoice
from tpuspec.overlaps import ModelLogits, Output
from tpuspec.sampling import SamplingParams
from tpuspec.serving import report_documents, verify
from tpuspec.serving.cli import make_parser

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 32


def random_chain(seed: int) -> np.ndarray:
    """[V(next), V(last)] over ids 1..7; 1 ends an output."""
    table = np.zeros((V, V))
    table[1:8] = np.random.default_rng(seed).dirichlet(np.ones(7), V).T
    return table


P, Q = random_chain(1), random_chain(2)


def verdict(engine: Engine, count: int) -> tuple[bool, list[dict]]:
    """Of everything but the greedy comparison."""
    samples = verify._sample(engine, [(5, 1)], count, 4, eos_id=1)
    outcomes, _ = verify.judge(samples, ModelLogits(chain(P)), ModelLogits(chain(Q)),
                               vocabulary_size=V, eos_id=1, rounding=3e-6)
    tests = verify.tests_of(outcomes)
    return verify.passed(tests, {"differences": []}), tests


def test_a_sound_engine_passes_and_the_report_says_what_would_be_seen():
    sound, tests = verdict(engine_with(chain(P), chain(Q), TINY), 250)
    assert sound
    assert len(tests) == (4 + 3 + 1 + 4 + 3 + 1 + 1)
    kinds = {test["kind"] for test in tests}
    assert len(kinds) == 7
    for kind in kinds:
        shares = [test["smallest_share"] for test in tests if test["kind"] == kind]
        assert ("plain" in kind) == (shares[0] is None)
    assert all(test["smallest_share"] < 0.25 for test in tests if "drift" in test["kind"])


def half_in_place_of_the_coin(*args, **options):
    """A greedy accept rule: raw p/q ≥ 1/2."""
    *first, coins, next_coins = args
    return kernels.rejection_sample(*first, jnp.full_like(coins, 0.5), next_coins, **options)


def no_residual(*args, **options):
    """The correction of the first draft comes from p instead of the residual."""
    *first, limit, active, coins, next_coins = args
    good = kernels.rejection_sample(*args, **options)
    plain = kernels.rejection_sample(*first, jnp.zeros_like(limit), active, coins, next_coins,
                                     **options)
    return good._replace(next_token_B=jnp.where(
        good.accepted_B == 0, plain.next_token_B, good.next_token_B))


@pytest.mark.parametrize(("broken", "drifts"), [
    (no_residual, True),
    # Tokens are kept too often and too seldom, which cancels in the mean of acceptance.
    pytest.param(half_in_place_of_the_coin, False, marks=pytest.mark.slow)])
def test_a_broken_sampler_is_caught(broken, drifts, monkeypatch):
    monkeypatch.setattr(KernelChoice, "rejection_sample",
                        lambda self, *args, **options: broken(*args, **options))
    engine = Engine(chain(P), chain(Q), TINY, vocabulary_size=V)
    engine.compile()
    sound, tests = verdict(engine, 200)
    assert not sound
    caught = {test["kind"] for test in tests if test["adjusted_p_value"] < verify.FAMILY_LEVEL}
    assert any("exact" in kind for kind in caught)
    assert ("drift of acceptance" in caught) or not drifts


def test_every_output_is_enumerated_with_its_probability():
    sampling = SamplingParams(temperature=0.8, top_k=3)
    found = exactness.enumerate_outputs(
        ModelLogits(chain(P)), (5, 1), length=3, sampling=sampling, eos_id=1, vocabulary_size=V)
    wanted = sequences(np.log(np.maximum(P, 1e-26)), 3, eos_ids=(1,), temperature=0.8, top_k=3)
    assert {(*ids, *[0] * (3 - len(ids))): pytest.approx(p, rel=1e-4)
            for ids, p in found.items()} == wanted
    assert sum(found.values()) == pytest.approx(1)


def test_views_of_outputs_that_end_early():
    counts = {(5, 6, 7): 3, (5, 1): 2, (1,): 1}
    groups = {str(view): view.group(counts) for view in exactness.views(3)}
    assert groups["position 0"] == {(5,): 5, (1,): 1}
    assert groups["position 2"] == {(7,): 3, (-1,): 3}
    assert groups["positions 1 to 2"] == {(6, 7): 3, (1, -1): 2, (-1, -1): 1}
    assert len(groups["positions 0 to 2"]) == 3


def test_samples_come_by_seed_whatever_the_number_of_slots():
    engine = engine_with(chain(P), chain(Q), TINY)

    def sampled(count, first_seed, draft_length):
        return exactness.sample(engine, (5, 1), count=count, length=4, draft_length=draft_length,
                                sampling=SamplingParams(temperature=1.0), eos_id=1,
                                first_seed=first_seed)

    many = sampled(40, 0, 4)
    assert sampled(5, 30, 4) == many[30:35] != sampled(5, 0, 4)
    assert all(len(ids) == 4 or ids[-1] == 1 for ids in many)


def test_an_output_that_the_target_cannot_give_fails():
    outputs = [Output(source=(1,), tokens=(5, 6), block=0)] * 50
    reader = ModelLogits(fixed({5: 0.5, 7: 0.5}, V))
    found = exactness.drift(reader, ModelLogits(fixed({5: 0.9, 6: 0.1}, V)), outputs,
                            SamplingParams(temperature=1.0, top_k=2), V, rounding=3e-6, where="w")
    assert found.p_value == 0.0


def test_frequencies_of_positions_by_hand():
    """Outputs of two places over the ids 5, 6 and the end, 1."""
    target, draft = {(5, 5): 0.3, (5, 1): 0.5, (1,): 0.2}, {(6, 5): 1.0}
    first, second = exactness.frequencies([(5, 1)] * 3 + [(1,)], target, draft, length=2)
    assert first == {5: (pytest.approx(0.8), 0.0, 3), 1: (0.2, 0.0, 1), 6: (0.0, 1.0, 0)}
    assert list(first) == [5, 1, 6]
    assert second == {1: (0.5, 0.0, 3), 5: (0.3, 1.0, 0), None: (0.2, 0.0, 1)}


def test_greedy_outputs_that_differ_are_named_with_their_margin():
    target = ModelLogits(fixed({5: 0.5, 6: 0.5 - 1e-7, 7: 1e-7}, V))
    clear = ModelLogits(fixed({5: 0.7, 6: 0.3}, V))
    plain, other = [(5, 5, 5), (5, 5, 5)], [(5, 6, 5), (5, 5)]
    sources = [(1,), (1,)]
    for reader, near in ((target, True), (clear, False)):
        found = verify.compare_greedy(sources, plain, other, reader, vocabulary_size=V,
                                      tolerance=1e-4)
        assert [(one["source"], one["position"]) for one in found["differences"]] == [
            (0, 1), (1, 2)]
        assert verify.passed([], found) is near
        assert found["near_ties"] == (6 if near else 0) and found["positions"] == 6
    assert found["smallest_margin"] == pytest.approx(np.log(7 / 3), rel=1e-3)
    same = verify.compare_greedy(sources, plain, plain, clear, vocabulary_size=V, tolerance=1e-4)
    assert same["differences"] == [] and verify.passed([], same)
    longer = verify.compare_greedy(sources, plain, [(5, 5, 5), (5, 5, 5, 5)], target,
                                   vocabulary_size=V, tolerance=1e-4)
    assert longer["differences"] == [
        {"source": 1, "position": 3, "margin": None, "near_tie": False}]
    assert not verify.passed([], longer)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_command_passes_a_sound_pair(dtype, tiny_pair, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "one two"}\n')
    args = make_parser().parse_args([
        "verify", "--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft"),
        "--input", str(source), "--samples", "100", "--json",
        *(["--dtype", dtype] if dtype != "float32" else [])])
    assert verify.run(args) == 0
    document = json.loads(capsys.readouterr().out)
    printed = verify._text(document)
    assert report_documents.check(document) == "verify"
    assert "Exact, as far as this sees." in printed and "1 of 1 outputs" in printed
    assert args.dtype == dtype == document["dtype"]
    assert [one["position"] for one in document["frequencies"]] == [0, 1, 2, 3]
    for one in document["frequencies"]:
        assert sum(token["count"] for token in one["ids"]) == one["outputs"] == 100
        assert sum(token["target"] for token in one["ids"]) == pytest.approx(1.0)
    assert all(isinstance(token["text"], str) for token in document["frequencies"][0]["ids"])
    args.draft = None
    with pytest.raises(ValueError, match="verify needs a draft"):
        verify.run(args)
