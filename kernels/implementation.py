"""Every kernel has two implementations: which of them a call takes."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Implementation = Literal["xla", "pallas"]


def dispatch[Result](
    implementation: Implementation | None,
    pallas: Callable[[], Result],
    xla: Callable[[], Result],
) -> Result:
    """Runs one of two implementations of the same function.

    None takes the kernel on a TPU, if it supports the shapes, and XLA otherwise.

    Raises:
      NotImplementedError: "pallas" was asked for and does not support the shapes.
    """
    if implementation == "xla" or (implementation is None and jax.default_backend() != "tpu"):
        return xla()
    try:
        return pallas()
    except NotImplementedError:
        if implementation == "pallas":
            raise
        return xla()


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 means float32: the matrix unit would round the factors of a product."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
