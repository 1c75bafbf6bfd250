"""α along texts against closed forms, and simple drafts by hand."""

import numpy as np
import pytest
from engines import TINY, Job, engine_with, solo
from programmable import chain, fixed, rand
from sampling_oracle import warp

from tpuspec import overlaps, simple_drafts
from tpuspec.acceptance_figures import target_runs
from tpuspec.overlaps import ModelLogits, Output
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 12


def random_chain(seed: int) -> np.ndarray:
    table = np.zeros((V, V))
    table[2:] = np.random.default_rng(seed).dirichlet(np.ones(V - 2), V).T
    return table


P, Q = random_chain(1), random_chain(2)
OUTPUTS = [Output(source=(3, 1), tokens=(4, 5, 6, 7, 8, 9, 10, 11, 3), block=0),
           Output(source=(5, 6, 1), tokens=(3, 9), block=1)]


def expected(table_p, table_q, outputs, **options):
    """Σ min(p, q) and min(1, q/p) at every place, in float64."""
    found = []
    for output in outputs:
        for last, token in zip((0, *output.tokens[:-1]), output.tokens, strict=True):
            p, q = (warp(np.log(np.maximum(table[:, last], 1e-26)), *options.values(), V)[0]
                    for table in (table_p, table_q))
            found.append((np.minimum(p, q).sum(), min(1.0, q[token] / p[token]) if p[token]
                          else 0.0))
    return np.array(found).T


@pytest.mark.parametrize("options", [
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    dict(temperature=0.7, top_k=4, top_p=0.9, min_p=0.0),
    dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)])
def test_overlaps_of_known_models_under_every_warp(options):
    found = overlaps.measure(ModelLogits(chain(P)), {"q": ModelLogits(chain(Q))}, OUTPUTS,
                             SamplingParams(**options), V)["q"]
    assert [len(array) for array in found.overlaps] == [9, 2]
    overlap, kept = expected(P, Q, OUTPUTS, **options)
    np.testing.assert_allclose(np.concatenate(found.overlaps), overlap, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(found.kept), kept, atol=1e-5)
    if options["temperature"] == 0:
        greedy = sum(int(token != np.argmax(P[:, last])) for output in OUTPUTS for last, token
                     in zip((0, *output.tokens[:-1]), output.tokens, strict=True))
        assert found.impossible == greedy > 0


def test_a_draft_that_is_the_target_overlaps_wholly_and_one_pass_serves_all():
    class Counted(ModelLogits):
        calls = 0

        def logits(self, outputs, width):
            Counted.calls += 1
            return super().logits(outputs, width)

    target = Counted(rand(0, vocab=V))
    found = overlaps.measure(target, {"same": ModelLogits(rand(0, vocab=V)),
                                      "uniform": simple_drafts.Uniform(V)},
                             OUTPUTS[:1], SamplingParams(temperature=1.0), V)
    assert Counted.calls == 1
    np.testing.assert_allclose(found["same"].overlaps[0], 1.0, atol=1e-5)
    np.testing.assert_allclose(found["same"].kept[0], 1.0, atol=1e-4)
    assert (found["uniform"].overlaps[0] < 1).all() and (found["uniform"].overlaps[0] > 0).all()


def test_logits_that_are_not_finite_are_refused():
    class Broken:
        def logits(self, outputs, width):
            return np.full((len(outputs), width, V), np.nan, np.float32)

    with pytest.raises(ValueError, match="logits of the target or of draft are not finite"):
        overlaps.measure(ModelLogits(fixed({5: 1.0}, V)), {"draft": Broken()}, OUTPUTS,
                         SamplingParams(temperature=1.0), V)


CORPUS = [(4, 5, 4, 5), (4, 6, 1)]


def probabilities(draft, outputs, width):
    logits = draft.logits(outputs, width)
    assert logits.shape == (len(outputs), width, V) and logits.dtype == np.float32
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_tables_are_counts():
    output = Output(source=(1,), tokens=(4, 6, 9, 4), block=0)
    unigram = probabilities(simple_drafts.Unigram(CORPUS, V), [output], 8)
    np.testing.assert_allclose(unigram[0, 3, [1, 4, 5, 6]], np.array([1, 3, 2, 1]) / 7, rtol=1e-6)
    bigram = probabilities(simple_drafts.Bigram(CORPUS, V, start_id=0), [output], 8)
    np.testing.assert_allclose(bigram[0, 0, 4], 1.0)  # both begin with 4
    np.testing.assert_allclose(bigram[0, 1, [5, 6]], [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(bigram[0, 2, 1], 1.0)
    np.testing.assert_allclose(bigram[0, 3], unigram[0, 3])  # 9 never came
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        simple_drafts.Unigram([()], V)


def test_a_copy_continues_the_longest_context_at_its_latest_place():
    draft = simple_drafts.NgramCopy(V, pad_id=0)

    def drafts(source, tokens):
        found = probabilities(draft, [Output(source=source, tokens=tokens, block=0)], 8)
        return found[0].argmax(-1)[:len(tokens)].tolist()

    assert drafts((5, 6, 7, 1), (5, 6, 7, 1)) == [0, 6, 7, 1]
    assert drafts((4, 5, 8, 3, 5, 9, 1), (4, 5, 2)) == [0, 5, 8]  # two tokens beat the later one
    assert drafts((5, 8, 1), (5, 9, 5, 3)) == [0, 8, 0, 9]  # the text is later than the source


def test_every_name_makes_a_draft():
    for name in simple_drafts.NAMES:
        made = simple_drafts.make(name, CORPUS, V, start_id=0, pad_id=0)
        assert probabilities(made, OUTPUTS, 16).sum() == pytest.approx(2 * 16, rel=1e-4)


def test_target_runs_of_finished_texts_are_those_of_the_engine():
    """Greedy, where acceptance is certain or impossible: run for run."""
    rates = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.ones(32), 32).T
        q = np.where(rng.random(32) < 0.7, p, rng.dirichlet(np.ones(32), 32).T)
        target, draft = chain(p), chain(q)
        result = solo(engine_with(target, draft, TINY), Job(eos_ids=()))
        output = Output(source=(1,), tokens=tuple(result.ids), block=0)
        found = overlaps.measure(ModelLogits(target), {"draft": ModelLogits(draft)}, [output],
                                 SamplingParams(), 32)["draft"]
        assert found.impossible == 0
        assert target_runs(found.kept[0], 4) == result.stats.steps
        rates.append(result.stats.tokens_per_target_run)
    assert len(set(rates)) > 2 and max(rates) > 1.5


def test_uniform_is_any_id_at_temperature_0_and_all_alike_above():
    outputs = [Output(source=(1,), tokens=(3,) * 64, block=0)] * 16
    target, draft = ModelLogits(fixed({3: 1.0}, V)), simple_drafts.Uniform(V)
    for temperature, spread in ((0.0, 0.03), (1.0, 1e-4)):
        found = overlaps.measure(target, {"uniform": draft}, outputs,
                                 SamplingParams(temperature=temperature), V)["uniform"]
        assert np.mean(found.overlaps) == pytest.approx(1 / V, abs=spread)
