"""``tpuspec verify``: whether a pair on this machine samples exactly what its target would.

Every test asks whether the output deviates from the target's distribution; see
``tpuspec.exactness``. They are many, so that their p-values are adjusted for their number
(Holm): a sound pair fails in about one of a thousand runs, whichever tests these are. (About,
because the distributions that p-values come from are approximations, too small by a factor of
2 or so that far out.)
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from tpuspec import exactness, significance
from tpuspec.config import EngineConfig
from tpuspec.conversion_check import TOLERANCES
from tpuspec.engine import Engine
from tpuspec.exactness import Frequencies, Ids
from tpuspec.overlaps import Logits, ModelLogits, Output
from tpuspec.sampling import SamplingParams
from tpuspec.serving import models, prompts
from tpuspec.serving.client import make_request
from tpuspec.serving.measure import progress
from tpuspec.serving.validation import Door
from tpuspec.significance import Outcome

FAMILY_LEVEL = 1e-3  # about the chance that a sound pair fails
_SLOTS = 16
_SOURCES, _GREEDY_SOURCES = 2, 32  # that are sampled, the shortest; and decoded greedily
_LENGTH = 4  # tokens whose counts are compared
_LONG, _GREEDY_LENGTH = 16, 48  # tokens of outputs whose acceptance is looked at, and of greedy
_WHOLE, _FEW = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)
_ROUNDING = {"float32": 3e-6, "bfloat16": 3e-3}


@dataclasses.dataclass
class Samples:
    """What the engine gave for one source."""

    source: Ids
    few: list[Ids]  # speculative, of a vocabulary cut by top-k; of _LENGTH tokens
    whole: list[Ids]  # speculative, of _LONG tokens
    plain: list[Ids]  # of _LENGTH tokens


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a test fails."""
    document = verify(args)
    print(json.dumps(document, indent=1) if args.json else _text(document))
    return 0 if document["passed"] else 1


def verify(args: argparse.Namespace) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    texts = prompts.read(args.input, bundled=args.target is None)[:_GREEDY_SOURCES]
    with models.pair(args.target, args.draft) as pair:
        if pair.draft is None:
            raise ValueError("verify needs a draft beside the target")
        buckets = {models.source_bucket(pair, *prompts.lengths(part))
                   for part in ([text] for text in texts)}
        config = EngineConfig(
            slots=_SLOTS, source_buckets=tuple(sorted({min(buckets), max(buckets)})),
            max_target_length=_GREEDY_LENGTH, draft_lengths=(0, args.draft_length),
            draft_length=args.draft_length)
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
        engine, eos_id = served.engine, served.info.eos_id
        if not isinstance(engine, Engine):
            raise TypeError(f"verify needs the engine itself, got {type(engine).__name__}")
        models.warm_up(engine, measure=False)
        door = Door(config, vocabulary_size=engine.vocabulary_size, eos_id=eos_id,
                    vocabulary=served.vocabulary)
        sources = [door.check(make_request(text)).source for text in texts]
        shortest = sorted(set(sources), key=lambda source: (len(source), source))[:_SOURCES]
        samples = _sample(engine, shortest, args.samples, args.draft_length, eos_id)
        greedy = {length: _greedy(engine, sources, length, eos_id)
                  for length in (0, args.draft_length)}
        size = engine.vocabulary_size
        vocabulary = served.vocabulary
        del served, engine, door  # before the models come again, for reading
        target, (draft,) = models.load_models(pair.target, [pair.draft], dtype=args.dtype,
                                              mesh_shape=args.mesh)
        dtype = str(target.model.embedding[...].dtype)
        readers = (ModelLogits(target.model), ModelLogits(draft.model))
        outcomes, frequencies = judge(samples, *readers, vocabulary_size=size,
                                      eos_id=eos_id, rounding=_ROUNDING[dtype])
        identity = compare_greedy(sources, greedy[0], greedy[args.draft_length], readers[0],
                                  vocabulary_size=size, tolerance=TOLERANCES[dtype])
        tests = tests_of(outcomes)
        return {
            "target": pair.target.resolve().name, "draft": pair.draft.resolve().name,
            "dtype": args.dtype or dtype, "gamma": args.draft_length, "samples": args.samples,
            "sources": len(samples), "family_level": FAMILY_LEVEL, "power": significance.POWER,
            "passed": passed(tests, identity), "greedy": identity, "tests": tests,
            "frequencies": [
                {"source": source, "position": at, "outputs": args.samples, "ids": [
                    {"id": token, "target": p, "draft": q, "count": count, "text": None
                     if token is None or vocabulary is None else vocabulary.decode([token])}
                    for token, (p, q, count) in of.items()]}
                for source, positions in enumerate(frequencies)
                for at, of in enumerate(positions)]}


def _sample(engine: Engine, sources: Sequence[Ids], count: int, draft_length: int, eos_id: int,
            ) -> list[Samples]:
    found = []
    with progress(3 * count * len(sources), "output", "sampling") as bar:
        seeds = itertools.count(0, count)  # none comes twice
        for source in sources:
            few, whole, plain = (
                exactness.sample(engine, source, count=count, length=length, draft_length=drafts,
                                 sampling=sampling, eos_id=eos_id, first_seed=next(seeds),
                                 progress=bar.update)
                for sampling, length, drafts in (
                    (_FEW, _LENGTH, draft_length), (_WHOLE, _LONG, draft_length),
                    (_WHOLE, _LENGTH, 0)))
            found.append(Samples(source=source, few=few, whole=whole, plain=plain))
    return found


def _greedy(engine: Engine, sources: Sequence[Ids], draft_length: int, eos_id: int) -> list[Ids]:
    return [exactness.sample(engine, source, count=1, length=_GREEDY_LENGTH, eos_id=eos_id,
                             draft_length=draft_length, sampling=SamplingParams(),
                             first_seed=0)[0] for source in sources]


def judge(samples: Sequence[Samples], target: Logits, draft: Logits, *, vocabulary_size: int,
          eos_id: int, rounding: float) -> tuple[list[Outcome], list[list[Frequencies]]]:
    """All tests of sampled outputs, and by source and position what the first ones counted.

    Args:
      rounding: of a probability.
    """
    outcomes: list[Outcome] = []
    counted: list[list[Frequencies]] = []
    for number, one in enumerate(samples):
        where = f"source {number}"
        exact, of_draft = (exactness.enumerate_outputs(
            reader, one.source, length=_LENGTH, sampling=_FEW, eos_id=eos_id,
            vocabulary_size=vocabulary_size) for reader in (target, draft))
        outcomes += exactness.against_exact(one.few, exact, of_draft, length=_LENGTH, where=where)
        counted.append(exactness.frequencies(one.few, exact, of_draft, length=_LENGTH))
        outcomes += exactness.against_plain(one.whole, one.plain, length=_LENGTH, where=where)
    outputs = [Output(source=one.source, tokens=ids, block=number)
               for number, one in enumerate(samples) for ids in one.whole]
    outcomes.append(exactness.drift(target, draft, outputs, _WHOLE, vocabulary_size,
                                    rounding=rounding, where="all sources"))
    return outcomes, counted


def compare_greedy(sources: Sequence[Ids], plain: Sequence[Ids], speculative: Sequence[Ids],
                   target: Logits, *, vocabulary_size: int, tolerance: float) -> dict[str, Any]:
    """Whether greedy outputs are the same, and how near to a tie the target was.

    Args:
      tolerance: a share of the largest logit: what rounding may decide.
    """
    outputs = [Output(source=source, tokens=ids, block=0)
               for source, ids in zip(sources, plain, strict=True)]
    margins, largest = exactness.margins(target, outputs, vocabulary_size)
    tie = tolerance * largest
    differences = []
    for number, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one != other:
            at = next(i for i in range(max(len(one), len(other))) if one[i:i + 1] != other[i:i + 1])
            # What goes on behind the plain output's end is no matter of rounding.
            margin = float(margins[number][at]) if at < len(one) else None
            differences.append({"source": number, "position": at, "margin": margin,
                                "near_tie": margin is not None and margin <= tie})
    return {"sources": len(plain), "positions": sum(map(len, plain)), "differences": differences,
            "near_ties": sum(int((margin <= tie).sum()) for margin in margins),
            "tie_margin": tie, "smallest_margin": min(float(m.min()) for m in margins)}


def tests_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Their JSON; what a test sees, it sees at the level that all of them share."""
    adjusted = significance.holm([outcome.p_value for outcome in outcomes])
    level = FAMILY_LEVEL / len(outcomes)
    return [{
        "kind": one.kind, "where": one.where, "p_value": one.p_value, "adjusted_p_value": p,
        "samples": one.samples, "degrees": one.degrees, "effect": one.effect,
        "smallest_effect": one.smallest_effect(level) if one.degrees else None,
        "smallest_share": one.smallest_share(level)}
        for one, p in zip(outcomes, adjusted, strict=True)]


def passed(tests: Sequence[dict[str, Any]], greedy: dict[str, Any]) -> bool:
    return (all(test["adjusted_p_value"] >= FAMILY_LEVEL for test in tests)
            and all(one["near_tie"] for one in greedy["differences"]))


def _text(document: dict[str, Any]) -> str:
    tests, greedy = document["tests"], document["greedy"]
    lines = [f"{document['target']} with {document['draft']}, {document['dtype']}, gamma "
             f"{document['gamma']}, {document['samples']} outputs of each kind for each of "
             f"{document['sources']} sources:",
             f"{'test':<28} {'tests':>5} {'smallest p':>10} {'adjusted':>9} {'effect':>7} "
             f"{'seen from':>9} {'share of drafts seen from':>26}"]
    for kind in dict.fromkeys(test["kind"] for test in tests):
        group = [test for test in tests if test["kind"] == kind]
        worst = min(group, key=lambda test: test["p_value"])
        shares = [test["smallest_share"] for test in group if test["smallest_share"]]
        effects = [test["smallest_effect"] for test in group if test["smallest_effect"]]
        lines.append(
            f"{kind:<28} {len(group):>5} {worst['p_value']:>10.2g} "
            f"{worst['adjusted_p_value']:>9.2g} {worst['effect']:>7.3f} "
            f"{f'{min(effects):.3f}' if effects else '-':>9} "
            f"{f'{min(shares):.1%}' if shares else '-':>26}")
    lines += [
        f"p-values are adjusted for {len(tests)} tests (Holm): a sound pair fails one run in "
        f"{1 / FAMILY_LEVEL:.0f}.",
        "effect: Cohen's w; of drift, the share of tokens that are the draft's. Seen: with a "
        f"chance of {document['power']:.0%}.",
        f"Greedy: {greedy['sources'] - len(greedy['differences'])} of {greedy['sources']} "
        "outputs are token for token those of plain decoding; "
        f"{greedy['near_ties']} of {greedy['positions']} positions are near-ties (margin up to "
        f"{greedy['tie_margin']:.2g}; the smallest is {greedy['smallest_margin']:.2g})."]
    lines += [f"  source {one['source']} differs at position {one['position']}, margin "
              f"{'-' if one['margin'] is None else format(one['margin'], '.2g')}: "
              f"{'a near-tie' if one['near_tie'] else 'NOT a near-tie'}"
              for one in greedy["differences"]]
    lines += [f"FAILED: {test['kind']}, {test['where']}: p = {test['p_value']:.2g}"
              for test in tests if test["adjusted_p_value"] < FAMILY_LEVEL]
    lines.append("Exact, as far as this sees." if document["passed"] else "NOT EXACT.")
    return "\n".join(lines)
