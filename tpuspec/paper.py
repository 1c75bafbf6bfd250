"""Figures of Leviathan et al. 2022 (arXiv 2211.17192): T5-XXL on one TPU v4, batch size 1."""

from typing import NamedTuple

# Table 1: α and γ; by how much operations grow, and the speed-up, both for c = 0.
TABLE_1 = ((0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69),
           (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86))


class PaperRow(NamedTuple):
    """Of Tables 2 and 4: a T5 draft, the speed-up that Eq. (5) expects, and the one measured."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


TABLE_4 = tuple(PaperRow(*row) for row in (
    ("translation", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("translation", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("translation", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("translation", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("translation", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("translation", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("summarization", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("summarization", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("summarization", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("summarization", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("summarization", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("summarization", "large", 1, 3, 0.56, 0.11, 1.6, 1.7)))
# Of Table 3, α by task, draft and temperature.
TABLE_3 = {(row.task, row.draft, row.temperature): row.alpha for row in TABLE_4} | {
    ("translation", "bigram", 0): 0.20, ("translation", "unigram", 0): 0.08}
