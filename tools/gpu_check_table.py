"""The document of gpu_check.py, for people."""

from typing import Any


def table(document: dict[str, Any]) -> str:
    lines = [f"{document['device']} ({document['platform']}), JAX {document['jax']}, "
             f"{document['dtype']}, {document['date']}: {document['what']}."]
    for name, entry in document["targets"].items():
        sweep = entry["sweep"]
        if sweep is not None:
            lines += [f"{name}: c = {sweep['c']:.4f}; a copy moves "
                      f"{1e-9 * sweep['copy_bytes_per_s']:.0f} GB/s, a matrix product does "
                      f"{1e-12 * sweep['product_flops_per_s']:.2f} TFLOP/s",
                      f"  {'pass':<7}{'G':>3} {'ms':>9} {'T(G)/T(1)':>10} {'MB':>9} "
                      f"{'bytes / copy, ms':>17} {'share':>6}"]
            passes = [("target", width, of) for width, of in
                      sorted(sweep["target"].items(), key=lambda item: int(item[0]))]
            for role, width, of in (*passes, ("draft", "1", sweep["draft"])):
                widening = f"{of['widening']:.2f}" if "widening" in of else ""
                lines.append(f"  {role:<7}{width:>3} {of['ms']:>9.3f} {widening:>10} "
                             f"{1e-6 * of['bytes']:>9.1f} {of['bytes_over_bandwidth_ms']:>17.3f} "
                             f"{of['share_of_copy']:>6.2f}")
        if entry["rows"]:
            lines.append(f"  {'alpha':<23}{'gamma':>5} {'plain':>8} {'(wide)':>8} {'spec.':>8} "
                         f"{'tokens/run':>10} {'gain':>7} {'(expected)':>10} {'over wide':>9} "
                         f"{'(expected)':>10}")
        for row in entry["rows"]:
            low, high = row["alpha_interval"]
            alpha = f"{row['alpha_wanted']:g}: {row['alpha']:.2f} [{low:.2f}, {high:.2f}]"
            lines.append(
                f"  {alpha:<23}{row['gamma']:>5} {_number(row['plain_tokens_per_s'], '.1f'):>8} "
                f"{row['plain_same_width_tokens_per_s']:>8.1f} "
                f"{row['speculative_tokens_per_s']:>8.1f} {row['tokens_per_target_run']:>10.2f} "
                f"{_number(row['observed_speedup']):>7} {_number(row['predicted_speedup']):>10} "
                f"{row['observed_speedup_same_width']:>9.2f} "
                f"{row['predicted_speedup_same_width']:>10.2f}")
    lines.append("alpha: wanted, and measured with its 95 % interval. Tokens a second: plain by "
                 "passes of 1 position, plain by passes as wide as a verify pass, speculative; "
                 "gains over either. Expected: Eq. (5) with c and T(G)/T(1) of this run.")
    lines += [f"skipped, for want of time: {what}" for what in document["run"]["skipped"]]
    lines += [f"failed: {what}: {why}" for what, why in document["run"]["failed"].items()]
    return "\n".join(lines)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)
