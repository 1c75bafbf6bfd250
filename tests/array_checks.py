"""Checks jaxtyping annotations at run time, in the suite only (see pyproject.toml)."""

import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype


def _holds_shape(hint: Any) -> bool:
    return any(
        isinstance(part, type) and issubclass(part, jaxtyping.AbstractArray)
        for part in (hint, *typing.get_args(hint))
    )


def arrays_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks shapes and types of arrays; leaves other hints to the type checker.

    Pytrees of arrays pass through JAX with other things in the arrays' places, so
    hints without a shape must not bind at run time.
    """
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {
        name: hint if _holds_shape(hint) else Any for name, hint in hints.items()
    }
    return beartype(function)
