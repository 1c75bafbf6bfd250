"""What the kernel report has to know of a kernel at one shape.

The modules ``kernel_cases_*.py`` each define ``CASES``, a tuple of these.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

# Of the TPUs that every kernel is compiled for, one chip each: v4 and v5p have two
# cores that share the work of a kernel's "parallel" grid axes.
GENERATIONS = ("v4", "v5e", "v5p", "v6e")


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape: how to build it and what it has to do.

    Attributes:
      name: row of the report; unique, made of letters, digits, ``_``, ``=``, ``,``, ``.``
        and ``-``, for example ``"verify_attention_B=8_G=8_T=512"``.
      kernel: the ``name=`` given to ``pl.pallas_call``; the function compiles to a
        program with exactly one such call.
      build: takes a generation of ``GENERATIONS``, returns a function and the shapes
        and dtypes of its positional arguments (no sharding: the report adds it). Cases
        with the same ``build`` are compiled once, and differ in the attributes below.
      hbm_bytes: bytes the call has to move between HBM and the chip: every input read
        once, every output written once, with only the blocks below the given lengths.
        Over the bandwidth, it is the limit that the roofline ratio is held against.
      flops: floating-point operations of the matrix products, multiply and add counted
        as two.
      scalars: values of the operands that steer the kernel, by operand number of the
        ``pallas_call`` (scalar-prefetch operands come first, from 0), in the shape
        they have there, as int32 or float32. The report executes the kernel's scalar
        instructions on them, so that grid index maps, ``pl.when`` and loop bounds
        come out as they would on the chip: give the slots' lengths here.
      loop_trips: times, at least 1, that the body runs, for each loop whose end depends
        on data in vectors (``lax.while_loop`` over a reduction), in program order.
        Loops that are not reached with these ``scalars`` have a number too.
      donate_argnums: arguments whose buffers the call updates in place.
    """

    name: str
    kernel: str
    build: Callable[[str], tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]
    hbm_bytes: int
    flops: int
    scalars: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    loop_trips: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] = ()
