"""``tpuspec measure alpha``: Table 3 of the paper for models at hand.

The target writes texts (speculatively where it has a draft: the distribution is the
same); then target and drafts read them in one pass each, and at each position the two
next-token distributions overlap by Σ min(p, q), of which α is the mean.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuspec import acceptance_figures, overlaps, simple_drafts, theory
from tpuspec.checkpoint import LoadedModel
from tpuspec.checkpoint_location import path_of
from tpuspec.config import Sampler
from tpuspec.overlaps import Logits, ModelLogits, Output
from tpuspec.sampling import SamplingParams
from tpuspec.serving import local, models, prompts
from tpuspec.serving.measure import bounds, progress
from tpuspec.serving.storage import File

_LAGS = 8
_DRAFT_LENGTHS = (1, 3, 5, 7)
_SEED, _HELD_OUT_SEED = 0, 1 << 32  # of texts that are measured, and of those for tables


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    settings = [SamplingParams(temperature=temperature, top_k=args.top_k, top_p=args.top_p)
                for temperature in args.temperatures]
    names = args.draft or list(simple_drafts.NAMES)
    simple = [name for name in simple_drafts.NAMES if name in names]
    directories = [path_of(name) for name in names if name not in simple]
    sources = prompts.read(args.input, bundled=args.target is None)
    tables = bool(set(simple) & set(simple_drafts.TABLES))
    held_out: list[prompts.Prompt] = []
    if tables and args.corpus is None:
        if len(sources) < 2:
            raise ValueError("input must have at least 2 sources, half of them for the tables of "
                             f"bigram and unigram, or a corpus be named; got {len(sources)}")
        sources, held_out = sources[::2], sources[1::2]
    with models.pair(args.target, None) as pair:
        if args.target is None and pair.draft is not None and not args.draft:
            directories = [pair.draft, *directories]
        pair = dataclasses.replace(pair, draft=directories[0] if directories else None)
        texts, tables_of = _write(args, pair, settings, sources, held_out)
        target, drafts = models.load_models(pair.target, directories, dtype=args.dtype,
                                            mesh_shape=args.mesh)
        size = models.vocabulary_size(target, drafts)
        if args.corpus is not None and tables:
            tables_of = [_read_corpus(args.corpus, target)] * len(settings)
        readers = {_name(path, directories): ModelLogits(draft.model)
                   for path, draft in zip(directories, drafts, strict=True)}
        rows: list[dict[str, Any]] = []
        impossible = 0
        for sampling, outputs, corpus in zip(settings, texts, tables_of, strict=True):
            others: dict[str, Logits] = {name: simple_drafts.make(
                name, corpus, size, start_id=target.config.decoder_start_token_id,
                pad_id=target.config.pad_token_id) for name in simple}
            with progress(len(outputs), "text", f"temperature {sampling.temperature:g}") as bar:
                found = overlaps.measure(ModelLogits(target.model), readers | others, outputs,
                                         sampling, size, progress=bar.update)
            blocks = [output.block for output in outputs]
            rows += [_row(name, sampling, acceptance, blocks)
                     for name, acceptance in found.items()]
            impossible += max((acceptance.impossible for acceptance in found.values()), default=0)
        return {"target": pair.target.resolve().name, "dtype": args.dtype or models.default_dtype(),
                "impossible_tokens": impossible, "rows": rows}


def _write(args: argparse.Namespace, pair: models.Pair, settings: Sequence[SamplingParams],
           sources: Sequence[prompts.Prompt], held_out: Sequence[prompts.Prompt],
           ) -> tuple[list[list[Output]], list[list[tuple[int, ...]]]]:
    """For each setting the texts to measure, and those that tables are made of."""
    texts: list[list[Output]] = []
    tables: list[list[tuple[int, ...]]] = []
    bucket = models.source_bucket(pair, *prompts.lengths([*sources, *held_out]))
    with local.start(pair, slots=args.slots, source_buckets=(bucket,),
                     max_new_tokens=args.max_new_tokens, draft_length=local.DRAFT_LENGTH,
                     dtype=args.dtype, mesh=args.mesh, sampler=Sampler.REJECTION) as engine:
        for sampling in settings:
            written: list[list[Output]] = []
            for part, seed in ((sources, _SEED), (held_out, _HELD_OUT_SEED)):
                written.append([])
                with progress(args.tokens, "token", "writing") as bar:
                    for block, request, ids in prompts.outputs(
                            engine, part, tokens=args.tokens, repeat=sampling.temperature > 0,
                            seed=seed, temperature=sampling.temperature, top_k=sampling.top_k,
                            top_p=sampling.top_p):
                        written[-1].append(Output(source=request.source, tokens=ids, block=block))
                        bar.update(len(ids))
            texts.append(written[0])
            tables.append([output.tokens for output in written[1]])
    return texts, tables


def _read_corpus(url: str, target: LoadedModel) -> list[tuple[int, ...]]:
    if target.vocabulary is None:
        raise ValueError("corpus needs a target with a vocabulary")
    lines = (line.decode().strip() for line in File(url).lines())
    return [tuple(target.vocabulary.encode(line)) for line in lines if line]


def _name(path: pathlib.Path, among: Sequence[pathlib.Path]) -> str:
    """The last part of a path, or all of it where others end alike."""
    same = [other for other in among if other.resolve().name == path.resolve().name]
    return path.resolve().name if len(same) == 1 else str(path)


def _row(name: str, sampling: SamplingParams, acceptance: overlaps.Acceptance,
         blocks: Sequence[int]) -> dict[str, Any]:
    alpha = acceptance_figures.alpha(acceptance.overlaps, blocks)
    correlation = acceptance_figures.autocorrelation(acceptance.overlaps, _LAGS)
    return {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "draft": name, **alpha.to_json("alpha"), "tokens": alpha.count, "prompts": alpha.blocks,
        "by_position": [
            {"first": one.first, "last": one.last, **one.alpha.to_json("alpha"),
             "tokens": one.alpha.count}
            for one in acceptance_figures.by_position(acceptance.overlaps, blocks)],
        "autocorrelation": list(correlation.lags), "autocorrelation_noise": list(correlation.noise),
        "tokens_per_target_run": [
            {"gamma": gamma,
             "of_these_texts": acceptance_figures.tokens_per_run(acceptance.kept, gamma),
             "independent": acceptance_figures.tokens_per_run(  # that their ends cut as well
                 [np.full(len(text), alpha.value) for text in acceptance.kept], gamma),
             "equation_1": theory.expected_tokens(min(1.0, alpha.value), gamma)}
            for gamma in _DRAFT_LENGTHS]}


def text(document: dict[str, Any]) -> str:
    lines = [f"alpha = mean of sum min(p, q) along texts of {document['target']} "
             f"({document['dtype']}), with 95 % intervals between prompts:",
             f"{'temperature':>11} {'draft':<12} {'alpha':<22} {'tokens':>7} {'prompts':>7}  "
             + " ".join(f"{f'lag {lag}':>6}" for lag in (1, 2, 4, 8))
             + "  tokens a target run: gamma 3; gamma 7"]
    for row in document["rows"]:
        lags = [row["autocorrelation"][lag - 1] for lag in (1, 2, 4, 8)]
        runs = {run["gamma"]: run for run in row["tokens_per_target_run"]}
        lines.append(
            f"{row['temperature']:>11g} {row['draft']:<12} {bounds(row, 'alpha'):<22} "
            f"{row['tokens']:>7} {row['prompts']:>7}  "
            + " ".join("     -" if lag is None else f"{lag:>6.2f}" for lag in lags) + "  "
            + "; ".join(" ".join(f"{runs[gamma][name]:.2f}" for name in (
                "of_these_texts", "independent", "equation_1")) for gamma in (3, 7)))
    lines.append("By position in the text:")
    for row in document["rows"]:
        bins = [(f"{one['first']}" if one["first"] == one["last"] else
                 f"{one['first']}-{one['last']}") + f" {one['alpha']:.2f}"
                for one in row["by_position"]]
        lines.append(f"{row['temperature']:>11g} {row['draft']:<12} " + "   ".join(bins))
    noise = [row["autocorrelation_noise"][0] for row in document["rows"]]
    if (least := max((value for value in noise if value is not None), default=None)) is not None:
        lines.append(f"Lags: autocorrelation of acceptance; independent acceptance would stay "
                     f"within {least:.2f} of 0 at lag 1.")
    lines.append("Tokens a target run: of these very texts; if acceptance were independent along "
                 "them, so that only their ends cut runs short; of Eq. (1).")
    if document["impossible_tokens"]:
        lines.append(f"{document['impossible_tokens']} tokens stood where the target, reading, "
                     "gives them probability 0: ties that rounding decided otherwise.")
    return "\n".join(lines)
