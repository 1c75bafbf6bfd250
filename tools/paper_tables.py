"""The paper's tables beside what was measured, as text."""

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpuspec import theory
from tpuspec.paper import TABLE_1, TABLE_3, TABLE_4

DEMO = ("This is the bundled pair of tpuspec, and (\"expanded\") a larger target that computes the "
        "same:\na check of the experiment, not of the paper's models. The paper's rows are there "
        "to compare with.")


def tables(documents: Mapping[str, Any], pairs: Mapping[str, str], tasks: Sequence[str], *,
           demo: bool) -> str:
    """Args:
      documents: of ``reproduce_paper``, by name.
      pairs: directory of the draft by the pair's name.
    """
    lines = [*([DEMO, ""] if demo else []), *_table_1(), "", *_tables_2_and_4(
        documents, list(pairs), tasks), "", *_table_3(documents, pairs, tasks)]
    return "\n".join(lines) + "\n"


def _table_1() -> Iterator[str]:
    yield ("Table 1: speed-up by Eq. (5) and operations by Theorem 3.11, c = 0 (paper; "
           "tpuspec.theory)")
    for alpha, gamma, operations, speed in TABLE_1:
        yield (f"  alpha {alpha:.1f}, gamma {gamma:>2}: {speed:.2f}x; "
               f"{theory.speedup(alpha, gamma, 0):.2f}x   operations {operations:.2f}; "
               f"{theory.operations_factor(alpha, gamma, 0):.2f}")


def _tables_2_and_4(documents: Mapping[str, Any], pairs: Sequence[str], tasks: Sequence[str],
                    ) -> Iterator[str]:
    about = documents[f"speedup-{tasks[0]}-{pairs[0]}"]
    yield (f"Tables 2 and 4: one request at a time. Here: {about['platform']}, {about['dtype']}, "
           f"{about['prompts']} prompts, {about['repeats']} repeats, in turns; gamma is the one "
           "that Eq. (5)\nexpects most of, with the alpha, c and widening T(gamma+1)/T(1) "
           "measured; in brackets 95 % between prompts.")
    yield (f"  {'task':<14}{'draft':<10}{'temp.':>5}{'':>8}{'gamma':>6}{'alpha':>7}{'c':>7}"
           f"{'widening':>9}{'expected':>9}{'measured':>9}")

    def line(task: str, draft: str, temperature: float, whose: str, row: Mapping[str, Any],
             more: str = "") -> str:
        numbers = (_text(row[name], form) for name, form in (
            ("alpha", ">7.2f"), ("c", ">7.3f"), ("widening", ">9.2f"), ("expected", ">8.2f"),
            ("measured", ">8.2f")))
        alpha, c, widening, expected, measured = numbers
        return (f"  {task:<14}{draft:<10}{temperature:>5g}{whose:>8}{row['gamma']:>6}{alpha}{c}"
                f"{widening}{expected}x{measured}x{more}")

    for paper in TABLE_4:
        yield line(paper.task, paper.draft, paper.temperature, "paper",
                   paper._asdict() | {"widening": 1.0})
        if paper.task in tasks and paper.draft in pairs:
            row = _best(documents[f"speedup-{paper.task}-{paper.draft}"], paper.temperature)
            if row is not None:
                yield line(paper.task, paper.draft, paper.temperature, "here", *_ours(row))
    named = {(row.task, row.draft, row.temperature) for row in TABLE_4}
    for task in tasks:
        for pair in pairs:
            document = documents[f"speedup-{task}-{pair}"]
            for temperature in dict.fromkeys(row["temperature"] for row in document["rows"]):
                row = _best(document, temperature)
                if row is not None and (task, pair, temperature) not in named:
                    yield line(task, pair, temperature, "here", *_ours(row))


def _best(document: Mapping[str, Any], temperature: float) -> Mapping[str, Any] | None:
    """The draft length that a user would choose: by what Eq. (5) expects, not by the outcome."""
    rows = [row for row in document["rows"] if row["temperature"] == temperature]
    return max(rows, key=lambda row: row["predicted_speedup"] or 0.0, default=None)


def _ours(row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    figures = {"gamma": row["gamma"], "alpha": row["alpha"], "c": row["c"],
               "widening": row["widening"], "expected": row["predicted_speedup"],
               "measured": row["observed_speedup"]}
    low, high = row["observed_speedup_low"], row["observed_speedup_high"]
    return figures, f" ({_text(low, '.2f')} to {_text(high, '.2f')})"


def _text(value: float | None, form: str) -> str:
    if value is None or math.isnan(value):
        return format("-", form.partition(".")[0])
    return format(value, form)


def _table_3(documents: Mapping[str, Any], pairs: Mapping[str, str], tasks: Sequence[str],
             ) -> Iterator[str]:
    yield ("Table 3: alpha = mean of sum min(p, q) along the target's texts (95 % between "
           "prompts; the paper's for T5-XXL)")
    names = {of: name for name, draft in reversed(pairs.items())
             for of in (draft, pathlib.Path(draft).resolve().name)}
    for task in tasks:
        for row in documents[f"alpha-{task}"]["rows"]:
            draft = names.get(row["draft"], row["draft"])
            paper = TABLE_3.get((task, draft, row["temperature"]))
            yield (f"  {task:<14}{draft:<16}temperature {row['temperature']:g}: "
                   f"{row['alpha']:.2f} ({_text(row['alpha_low'], '.2f')} to "
                   f"{_text(row['alpha_high'], '.2f')}), {row['tokens']} tokens"
                   + ("" if paper is None else f"; paper {paper:.2f}"))
