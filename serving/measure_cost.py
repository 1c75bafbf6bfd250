"""``tpuspec measure cost``: c, the widening of the verify pass, and the memory they move."""

import argparse
import dataclasses
from typing import Any

from tpuspec import cost_sweep
from tpuspec.cost_sweep import CostSweep, PassCost
from tpuspec.serving import models
from tpuspec.serving.measure import progress


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    with models.pair(args.target, args.draft) as pair:
        target, drafts = models.load_models(
            pair.target, [] if pair.draft is None else [pair.draft], dtype=args.dtype,
            mesh_shape=args.mesh)
        draft = drafts[0] if drafts else None
        sweeps = []
        with progress(len(args.slots) * (len({1, *args.widths}) + len(drafts)), "program",
                      "compiling and timing") as bar:
            for slots in args.slots:
                sweeps.append(cost_sweep.sweep(
                    target.model, None if draft is None else draft.model, slots=slots,
                    widths=args.widths, source_positions=args.source, positions=args.length,
                    vocabulary_size=models.vocabulary_size(target, drafts),
                    mesh=models.mesh_of(args.mesh), progress=bar.update))
        return {"target": pair.target.resolve().name,
                "draft": None if pair.draft is None else pair.draft.resolve().name,
                "platform": models.platform_name(), "dtype": args.dtype or models.default_dtype(),
                "source": args.source, "length": args.length,
                "batches": [_batch(sweep) for sweep in sweeps]}


def _batch(sweep: CostSweep) -> dict[str, Any]:
    first = sweep.target[0].ms

    def of(cost: PassCost) -> dict[str, Any]:
        return {**dataclasses.asdict(cost), "bytes_per_s": cost.bytes_per_s,
                "share_of_copy": cost.bytes_per_s / sweep.copy_bytes_per_s}

    return {"slots": sweep.slots, "c": sweep.c, "copy_bytes_per_s": sweep.copy_bytes_per_s,
            "product_flops_per_s": sweep.product_flops_per_s,
            "draft": None if sweep.draft is None else of(sweep.draft),
            "target": [{**of(cost), "widening": cost.ms / first} for cost in sweep.target]}


def text(document: dict[str, Any]) -> str:
    lines = [f"{document['target']} with {document['draft'] or 'no draft'} on "
             f"{document['platform']}, {document['dtype']}; source {document['source']}, length "
             f"{document['length']}:"]
    for batch in document["batches"]:
        lines += [f"{batch['slots']} at once: c = "
                  + ("unknown" if batch["c"] is None else f"{batch['c']:.3f}")
                  + f"; a copy moves {1e-9 * batch['copy_bytes_per_s']:.1f} GB/s, a matrix "
                  f"product does {1e-9 * batch['product_flops_per_s']:.0f} GFLOP/s",
                  f"  {'pass':<8} {'G':>3} {'ms':>9} {'T(G)/T(1)':>10} {'MB':>9} {'GB/s':>7} "
                  f"{'of the copy':>12}"]
        rows = [("target", one) for one in batch["target"]]
        if batch["draft"] is not None:
            rows.append(("draft", batch["draft"]))
        lines += [f"  {name:<8} {one['width']:>3} {one['ms']:>9.3f} "
                  f"{format(one['widening'], '.2f') if 'widening' in one else '':>10} "
                  f"{1e-6 * one['moved']:>9.1f} {1e-9 * one['bytes_per_s']:>7.1f} "
                  f"{one['share_of_copy']:>12.2f}" for name, one in rows]
    lines.append("Medians of wall time in turns, 8 passes in a program. MB: weights that a pass "
                 "reads, and its caches; in a CPU's own caches they may come faster than a copy.")
    return "\n".join(lines)
