"""The check for a GPU at toy size on the CPU, its budget, and the acceptance that it sets."""

import json

import gpu_check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from controlled_pair import noise_for, noisy_drafts, random_draft
from gpu_check import TOY
from scipy.special import softmax
from timed_pieces import Piece, run_pieces

from tpuspec import cost_sweep
from tpuspec.checkpoint import named_parameters
from tpuspec.presets import preset

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_toy_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost_sweep, "COPY_BYTES", 2**20)
    monkeypatch.setattr(cost_sweep, "PRODUCT_SIZES", {"cpu": 64})
    file = tmp_path / "check.json"
    assert gpu_check.main(["--toy", "--json", str(file)]) == 0
    document, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert document["run"]["skipped"] == [] and document["run"]["failed"] == {}
    assert len(document["run"]["seconds"]) == 2 + 3 + 1  # sweep and plain; by alpha; one width more
    assert (document["platform"], document["dtype"]) == ("cpu", "bfloat16")
    entry = document["targets"]["toy"]
    passes = entry["sweep"]["target"]
    assert sorted(passes) == ["1", "2", "3"] and passes["1"]["widening"] == 1
    for of in (*passes.values(), entry["sweep"]["draft"]):
        assert of["share_of_copy"] == pytest.approx(of["bytes_over_bandwidth_ms"] / of["ms"])
    assert entry["sweep"]["c"] == pytest.approx(entry["sweep"]["draft"]["ms"] / passes["1"]["ms"])
    assert [(row["alpha_wanted"], row["gamma"]) for row in entry["rows"]] == [
        (1.0, 2), (0.75, 2), (0.62, 2)]
    for row in entry["rows"]:
        # Some hundred tokens of other texts than those that the noise was sought along.
        assert row["alpha"] == pytest.approx(row["alpha_wanted"], abs=0.12)
        assert row["observed_speedup"] == pytest.approx(
            row["speculative_tokens_per_s"] / row["plain_tokens_per_s"])
        assert row["tokens_per_target_run"] == pytest.approx(
            1 + row["alpha"] + row["alpha"]**2, abs=0.35)  # Eq. (1), and chance
        assert min(row[f"predicted_speedup{of}"] for of in ("", "_same_width")) > 0
    for text in ("toy: c = ", "T(G)/T(1)", "0.62: 0.", "wall-clock"):
        assert text in printed


def test_without_time_all_is_skipped_and_said(capsys):
    assert gpu_check.main(["--budget_s", "0"]) == 0
    table, _, text = capsys.readouterr().out.partition("\n{\n")
    document = json.loads("{\n" + text)
    assert len(document["run"]["skipped"]) == 2 * (1 + 1 + 3 + 11)
    assert document["run"]["seconds"] == {}
    assert "skipped, for want of time: t5-v1_1-xxl: speculative decoding at alpha 0.62" in table
    for name, entry in document["targets"].items():
        assert {field: entry["config"][field] for field in ("d_model", "d_ff", "num_heads")} == {
            field: getattr(preset(name), field) for field in ("d_model", "d_ff", "num_heads")}


def test_a_piece_begins_only_if_its_kind_fits():
    now, ran = [0.0], []

    def piece(kind: str, name: str, seconds: float) -> Piece:
        def work() -> None:
            ran.append(name)
            now[0] += seconds
        return Piece(kind=kind, what=name, work=work)

    saved = []
    report = run_pieces(
        [piece("long", "a", 50), piece("short", "b", 1), piece("long", "c", 10),
         piece("short", "d", 1), piece("other", "e", 100), piece("other", "f", 0)],
        99, lambda: saved.append(list(ran)), clock=lambda: now[0])
    assert ran == ["a", "b", "d", "e"]  # a second long one could end at 101
    assert report == {"seconds": {"a": 50, "b": 1, "d": 1, "e": 100}, "skipped": ["c", "f"],
                      "failed": {}}
    assert saved == [["a"], ["a", "b"], ["a", "b", "d"], ["a", "b", "d", "e"]]


def test_what_fails_is_told_and_the_rest_goes_on(monkeypatch, capsys):
    def refuse() -> None:
        raise ValueError("no memory left")

    pieces = [Piece(kind="a", what="first", work=refuse),
              Piece(kind="b", what="second", work=lambda: None)]
    monkeypatch.setattr(gpu_check.Check, "pieces", lambda self: pieces)
    assert gpu_check.main(["--toy"]) == 1
    printed = capsys.readouterr().out
    assert "failed: first: ValueError: no memory left" in printed
    assert '"second": ' in printed  # seconds that it took


@pytest.mark.parametrize("alpha", [0.62, 0.9])
def test_the_noise_gives_the_overlap_that_is_wanted(alpha):
    signal, noise = 3 * np.random.default_rng(0).normal(size=(2, 1, 50, 40)).astype(np.float32)
    share = noise_for(alpha, jnp.asarray(signal), jnp.asarray(noise))
    p, q = softmax(signal, -1), softmax((signal + share * noise) / np.sqrt(1 + share**2), -1)
    assert np.minimum(p, q).sum(-1).mean() == pytest.approx(alpha, abs=1e-3)


def test_a_draft_for_1_is_the_model_itself():
    model = random_draft(TOY.draft, jnp.bfloat16)
    drafts = noisy_drafts(model, (1.0, 0.7), TOY.source * [2], 16)
    heads = {alpha: named_parameters(draft)["lm_head.weight"]
             for alpha, (_, draft) in drafts.items()}
    same = jax.tree.map(lambda a, b: bool((a == b).all()), named_parameters(model),
                        named_parameters(drafts[1.0][1]))
    assert all(same.values())
    assert not (heads[0.7] == heads[1.0]).any(-1).all()
    sizes = [float(jnp.std(head.astype(jnp.float32))) for head in heads.values()]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
