"""All kernels that the report covers, each at the shapes that it is judged by."""

import kernel_cases_attention
import kernel_cases_decoder
import kernel_cases_sampling
from kernel_case import KernelCase

_ALL = (*kernel_cases_attention.CASES, *kernel_cases_decoder.CASES, *kernel_cases_sampling.CASES)
CASES: dict[str, KernelCase] = {case.name: case for case in _ALL}
if len(CASES) != len(_ALL):
    raise ValueError("two kernel cases have the same name")
