"""What speculative decoding is expected to gain (Leviathan et al. 2022, §3)."""

from tpuspec.config import check_range


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Tokens of one target run, Eq. (1): (1 - α^(γ+1)) / (1 - α)."""
    check_range("alpha", alpha, 0.0, 1.0)
    check_range("draft_length", draft_length, 0, None)
    return sum(alpha**i for i in range(draft_length + 1))


def speedup(alpha: float, draft_length: int, c: float, widening: float = 1.0) -> float:
    """Walltime gain over plain decoding, Eq. (5), with T(γ+1)/T(1) in place of 1.

    Args:
      alpha: acceptance rate.
      draft_length: γ.
      c: time of one draft pass over time of one target pass of width 1.
      widening: time of one target pass of width γ+1 over one of width 1.
    """
    check_range("c", c, 0.0, None)
    check_range("widening", widening, 0.0, None)
    return expected_tokens(alpha, draft_length) / (draft_length * c + widening)
