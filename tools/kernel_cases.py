"""All kernels that the report covers, each at the shapes that it is judged by."""

import kernel_cases_attention
import kernel_cases_sampling
from kernel_case import KernelCase

CASES: dict[str, KernelCase] = {
    case.name: case for case in (*kernel_cases_attention.CASES, *kernel_cases_sampling.CASES)
}
if len(CASES) != len(kernel_cases_attention.CASES) + len(kernel_cases_sampling.CASES):
    raise ValueError("two kernel cases have the same name")
