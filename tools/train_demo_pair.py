"""Trains the bundled demo pair: a target on data, a draft on the target's outputs.

    python tools/train_demo_pair.py target --data DIR --work DIR --minutes 100
    python tools/train_demo_pair.py draft  --data DIR --work DIR --minutes 20
    python tools/train_demo_pair.py export --data DIR --work DIR --out DIR

Each stage resumes from ``--work``, where ``--minutes`` counts what was spent there
before. ``--start`` begins the target from a released checkpoint (the optimizer's
memory is new), so that a later run goes on where an earlier one stopped; a draft
is cheap to distil again.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import demo_data
import demo_scores
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece
from flax import nnx
from jax import lax

from tpuspec import checkpoint
from tpuspec.config import T5Config
from tpuspec.t5 import T5
from tpuspec.vocabulary import Vocabulary

VOCAB = 4224  # 4096 pieces and 100 extra ids, padded to a multiple of 128
TARGET = T5Config(vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=512, num_heads=4,
                  num_layers=3, num_decoder_layers=5)
# Cross-attention finds the words that belong together in some hundred steps where
# nothing else can explain the output, and hardly at all below a deep decoder.
SHALLOW = dataclasses.replace(TARGET, num_layers=1, num_decoder_layers=1)
SHALLOW_SHARE = 0.25  # of the target's time, before it grows to its depth
DRAFT = T5Config(vocab_size=VOCAB, d_model=64, d_kv=32, d_ff=192, num_heads=2,
                 num_layers=1, num_decoder_layers=1)
LOG_SECONDS = 150
RESTORE_SHARE = 0.3  # of the restore examples, a fresh choice each epoch


def optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Muon for the matrices inside the stacks, Adam for the rest."""
    def matrices(params):
        def pick(path, leaf):
            name = jax.tree_util.keystr(path)
            inside = "layers" in name and leaf.ndim >= 2
            return optax.contrib.MuonDimensionNumbers(-2, -1) if inside else None
        return jax.tree_util.tree_map_with_path(pick, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(learning_rate, ns_steps=3, weight_decay=0.01, adam_b2=0.98,
                           consistent_rms=0.2, muon_weight_dimension_numbers=matrices))


def make_dropper(key: jax.Array, rate: float):
    """Dropout from 8-bit random numbers; a fresh key for every call in a trace."""
    count = iter(range(10**6))

    def drop(x: jax.Array) -> jax.Array:
        if rate == 0:
            return x
        bits = jax.random.bits(jax.random.fold_in(key, next(count)), x.shape, jnp.uint8)
        dropped = round(rate * 256)
        return jnp.where(bits >= dropped, x * (256 / (256 - dropped)), 0.0)
    return drop


def teacher_inputs(target: jax.Array) -> jax.Array:
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)))  # the start id is 0


def forward(graphdef, params, batch, drop):
    model = nnx.merge(graphdef, params)
    encoded = model.encode(batch["source"], batch["source_lengths"], drop)
    return model.decode_teacher_forced(
        teacher_inputs(batch["target"]), encoded, batch["source_lengths"], drop)


def weights_of(batch) -> jax.Array:
    positions = jnp.arange(batch["target"].shape[1])
    return (positions[None] < batch["target_lengths"][:, None]).astype(jnp.float32)


def cross_entropy(graphdef, params, batch, drop):
    logits = forward(graphdef, params, batch, drop)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    weights = weights_of(batch)
    return (losses * weights).sum() / weights.sum()


def distillation(graphdef, teacher, params, batch, drop):
    """KL(target || draft) at every position of the target's own outputs."""
    teacher_logits = lax.stop_gradient(forward(*teacher, batch, lambda x: x))
    log_p = jax.nn.log_softmax(teacher_logits)
    log_q = jax.nn.log_softmax(forward(graphdef, params, batch, drop))
    weights = weights_of(batch)
    return ((jnp.exp(log_p) * (log_p - log_q)).sum(-1) * weights).sum() / weights.sum()


class Trainer:
    """One training run: batches in; a checkpoint and a log line every LOG_SECONDS."""

    def __init__(self, work: pathlib.Path, config: T5Config, loss, *, minutes: float,
                 learning_rate: float, dropout: float, seed: int, start: T5 | None = None):
        if start is None:
            start = T5(config, rngs=nnx.Rngs(seed))
            start.embedding[...] *= 0.25
        self.graphdef, self.params = nnx.split(start)
        self.work, self.minutes = work, minutes
        self.optimizer = optax.inject_hyperparams(optimizer)(learning_rate=learning_rate)
        self.peak = learning_rate
        self.opt_state = self.optimizer.init(nnx.to_pure_dict(self.params))
        self.steps = 0
        self.spent = 0.0
        work.mkdir(parents=True, exist_ok=True)
        if (work / "state.npz").exists():
            self._load()
        graphdef, opt = self.graphdef, self.optimizer

        @jax.jit
        def gradients(params, batch, key):
            drop = make_dropper(key, dropout)
            return jax.value_and_grad(
                lambda p: loss(graphdef, with_pure(self.params, p), batch, drop))(params)

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def update(grads, params, opt_state):  # apart: compiled once for all widths
            updates, opt_state = opt.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.gradients, self.update = gradients, update
        self.evaluate_loss = jax.jit(
            lambda p, batch: loss(graphdef, with_pure(self.params, p), batch, lambda x: x))

    def rate(self, fraction: float) -> float:
        """Warm up, hold, and fall linearly over the last 30 % of the time."""
        return self.peak * min(1.0, (self.steps + 1) / 100, max(0.0, 1 - fraction) / 0.3)

    def run(self, epoch, valid: list[demo_data.Batch]) -> None:
        """``epoch(rng)`` yields the batches of one epoch."""
        key = jax.random.key(17 + self.steps, impl="unsafe_rbg")
        params = nnx.to_pure_dict(self.params)
        began, last, losses, tokens = time.monotonic() - self.spent, time.monotonic(), [], 0
        rng = np.random.default_rng(self.steps)
        while True:
            for batch in epoch(rng):
                fraction = (time.monotonic() - began) / (60 * self.minutes)
                if fraction >= 1:
                    self._save(params, self.spent)
                    return
                self.opt_state.hyperparams["learning_rate"] = jnp.float32(self.rate(fraction))
                value, grads = self.gradients(params, dataclasses.asdict(batch),
                                              jax.random.fold_in(key, self.steps))
                params, self.opt_state = self.update(grads, params, self.opt_state)
                self.steps += 1
                losses.append(float(value))
                tokens += int(batch.target_lengths.sum())
                self.spent = time.monotonic() - began
                if time.monotonic() - last > LOG_SECONDS:
                    held_out = float(np.mean(
                        [self.evaluate_loss(params, dataclasses.asdict(b)) for b in valid]))
                    record = dict(step=self.steps, minutes=round(self.spent / 60, 1),
                                  loss=round(float(np.mean(losses)), 4),
                                  valid=round(held_out, 4),
                                  target_tokens_per_s=round(tokens / (time.monotonic() - last)),
                                  rate=round(self.rate(fraction), 6))
                    print(json.dumps(record), flush=True)
                    with (self.work / "log.jsonl").open("a") as log:
                        log.write(json.dumps(record) + "\n")
                    self._save(params, self.spent)
                    last, losses, tokens = time.monotonic(), [], 0

    def _save(self, params, spent: float) -> None:
        self.params = with_pure(self.params, params)
        leaves = jax.tree.leaves((params, self.opt_state))
        partial = self.work / "partial.npz"
        np.savez(partial, steps=self.steps, spent=spent,
                 **{str(i): np.asarray(x) for i, x in enumerate(leaves)})
        partial.rename(self.work / "state.npz")

    def _load(self) -> None:
        with np.load(self.work / "state.npz") as saved:
            tree = (nnx.to_pure_dict(self.params), self.opt_state)
            leaves, structure = jax.tree.flatten(tree)
            params, self.opt_state = jax.tree.unflatten(
                structure, [jnp.asarray(saved[str(i)]) for i in range(len(leaves))])
            self.params = with_pure(self.params, params)
            self.steps, self.spent = int(saved["steps"]), float(saved["spent"])


def with_pure(state, pure):
    """A state like ``state`` with the arrays of the pure dictionary."""
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, pure)
    return state


def valid_batches(processor, examples, tokens: int = 4096) -> list[demo_data.Batch]:
    rng = np.random.default_rng(0)
    return [b for task in ("translate", "restore") for b in demo_data.batches(
        demo_data.encode(processor, [e.source for e in examples[task]]),
        demo_data.encode(processor, [e.references[0] for e in examples[task]]), tokens, rng)]


def references(args: argparse.Namespace, processor: sentencepiece.SentencePieceProcessor):
    """An epoch of the data, with one of the references for each source."""
    train = demo_data.load(args.data, "train")
    encoded = {t: demo_data.encode(processor, [e.source for e in rows])
               for t, rows in train.items()}
    answers = [[demo_data.encode(processor, list(e.references)) for e in rows]
               for rows in train.values()]

    def epoch(rng: np.random.Generator) -> Iterator[demo_data.Batch]:
        sources, targets = [], []
        for (task, rows), known in zip(encoded.items(), answers, strict=True):
            for source, answer in zip(rows, known, strict=True):
                if task == "translate" or rng.random() < RESTORE_SHARE:
                    sources.append(source)
                    targets.append(answer[rng.integers(len(answer))])
        yield from demo_data.batches(sources, targets, args.tokens, rng)

    return epoch


def train_target(args: argparse.Namespace,
                 processor: sentencepiece.SentencePieceProcessor) -> None:
    data = references(args, processor), valid_batches(
        processor, demo_data.load(args.data, "valid"))
    options = dict(learning_rate=args.learning_rate, dropout=args.dropout, seed=1)
    minutes = args.minutes
    if args.start:
        start = checkpoint.load(args.start, dtype=jnp.float32).model
    else:
        shallow = Trainer(args.work / "target-shallow", SHALLOW, cross_entropy,
                          minutes=SHALLOW_SHARE * minutes, **options | {"dropout": 0.0})
        shallow.run(*data)
        start = grown(nnx.merge(shallow.graphdef, shallow.params), TARGET)
        minutes *= 1 - SHALLOW_SHARE
    trainer = Trainer(args.work / "target", TARGET, cross_entropy, minutes=minutes, start=start,
                      **options)
    trainer.run(*data)
    print(json.dumps(demo_scores.scores(processor, trainer.graphdef, trainer.params,
                            demo_data.load(args.data, "valid"))))


def grown(small: T5, config: T5Config) -> T5:
    """A deeper model of the same width that computes the same: the layers that are new
    come last in their stacks and add nothing yet."""
    large = T5(config, rngs=nnx.Rngs(3))
    for name in ("embedding", "encoder_bias", "encoder_norm", "decoder_bias", "decoder_norm",
                 "lm_head"):
        setattr(large, name, getattr(small, name))
    for stack in ("encoder_layers", "decoder_layers"):
        layers, trained = getattr(large, stack), getattr(small, stack)
        for i, layer in enumerate(layers):
            if i < len(trained):
                layers[i] = trained[i]
                continue
            outputs = [layer.attention.o] if stack == "encoder_layers" else [
                layer.self_attention.o, layer.cross_attention.o]
            for output in (*outputs, layer.mlp.wo):
                output.weight[...] = jnp.zeros_like(output.weight[...])
    return large


def load_params(work: pathlib.Path, config: T5Config):
    """Graph, parameters and steps of a trained stage."""
    trainer = Trainer(work, config, cross_entropy, minutes=0, learning_rate=0, dropout=0, seed=0)
    if not trainer.steps:
        raise SystemExit(f"{work} holds no trained model; run the stage before this one")
    return trainer.graphdef, trainer.params, trainer.steps


def train_draft(args: argparse.Namespace, processor: sentencepiece.SentencePieceProcessor) -> None:
    """Half of the time on the references, a pass over which costs no run of the target,
    then half on the target's distributions over its own outputs, greedy and sampled."""
    first = Trainer(args.work / "draft-references", DRAFT, cross_entropy,
                    minutes=args.minutes / 2, dropout=0.0, learning_rate=args.learning_rate,
                    seed=2)
    first.run(references(args, processor),
              valid_batches(processor, demo_data.load(args.data, "valid")))
    *teacher, steps = load_params(args.work / "target", TARGET)
    train = demo_data.load(args.data, "train")
    rng = np.random.default_rng(5)
    sources = []
    for rows in train.values():
        chosen = rng.choice(len(rows), args.sentences // 2, replace=False)
        sources += demo_data.encode(processor, [rows[i].source for i in chosen])
    rng.shuffle(sources)
    # Named by the target's age: another target has other outputs and another draft.
    path = args.work / f"outputs-{steps}.json"
    if not path.exists():
        outputs = [demo_scores.generate_all(*teacher, sources, temperature=t, seed=int(7 * t),
                                progress=f"outputs at temperature {t}") for t in (0.0, 1.0)]
        path.write_text(json.dumps([sources, outputs]))
    sources, outputs = json.loads(path.read_text())
    held_out = len(sources) // 100
    valid = list(demo_data.batches(sources[:held_out] * 2, outputs[0][:held_out]
                                   + outputs[1][:held_out], args.tokens, rng))

    def epoch(rng: np.random.Generator) -> Iterator[demo_data.Batch]:
        yield from demo_data.batches(sources[held_out:] * 2, outputs[0][held_out:]
                                     + outputs[1][held_out:], args.tokens, rng)

    def loss(graphdef, params, batch, drop):
        return distillation(graphdef, teacher, params, batch, drop)

    Trainer(args.work / f"draft-{steps}", DRAFT, loss, minutes=args.minutes / 2, dropout=0.0,
            learning_rate=args.learning_rate, seed=2,
            start=nnx.merge(first.graphdef, first.params)).run(epoch, valid)


def export(args: argparse.Namespace, processor: sentencepiece.SentencePieceProcessor) -> None:
    """Writes both models as released checkpoints, in bfloat16, with their scores."""
    vocabulary = Vocabulary.load(args.work / "spiece.model")
    test = demo_data.load(args.data, "test")
    if args.out is None or any((args.out / name).exists() for name in ("target", "draft")):
        raise SystemExit("--out must name a folder without target and draft in it")
    card: dict[str, dict[str, float]] = {}
    models = {}
    *_, steps = load_params(args.work / "target", TARGET)
    for name, stage, config in (("target", "target", TARGET),
                                ("draft", f"draft-{steps}", DRAFT)):
        graphdef, params, _ = load_params(args.work / stage, config)
        # Scored as it is shipped: rounded to bfloat16, computed in float32.
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        model = nnx.merge(graphdef, params)
        card[name] = demo_scores.scores(processor, graphdef, params, test) | {
            "parameters": sum(x.size for x in jax.tree.leaves(params))}
        checkpoint.save(args.out / name, model, vocabulary, dtype=jnp.bfloat16,
                        provenance={"trained_by": "tools/train_demo_pair.py",
                                    "data": "tatoeba-en-de", "licence": "CC BY 2.0 FR",
                                    "test_scores": card[name]})
        models[name] = model
    card["alpha"] = demo_scores.acceptance(models["target"], models["draft"], vocabulary, test)
    print(json.dumps(card, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["target", "draft", "export"])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=100)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--sentences", type=int, default=40_000,
                        help="sources whose outputs the draft learns from")
    parser.add_argument("--start", type=pathlib.Path,
                        help="released target that training goes on from")
    parser.add_argument("--out", type=pathlib.Path, help="where export writes; new folders")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.work.absolute() / "xla"))
    if args.start and not (args.work / "spiece.model").exists():
        shutil.copy(args.start / "spiece.model", args.work)
    if not (args.work / "spiece.model").exists():
        demo_data.train_tokenizer(args.data, args.work / "spiece.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.work / "spiece.model"))
    {"target": train_target, "draft": train_draft, "export": export}[args.stage](args, processor)


if __name__ == "__main__":
    sys.exit(main())
