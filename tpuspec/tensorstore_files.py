"""Arrays in zarr, in a folder of files or packed in one OCDBT database: what Orbax and
T5X write, and we."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from tpuspec.lazy_tensor import Tensor

FLOATS = ("float32", "float16", "bfloat16")


def array_spec(directory: Path, name: str, *, zarr3: bool = False) -> dict[str, Any]:
    """Where the array of this dotted name lies in a folder that Orbax can restore."""
    url = str(directory) if "://" in str(directory) else f"file://{directory}"
    if (directory / "manifest.ocdbt").is_file():
        kvstore: Any = {"driver": "ocdbt", "base": f"{url}/", "path": f"{name}/"}
    else:
        kvstore = f"{url}/{name}/"
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}


def open_store(spec: dict[str, Any], name: str) -> ts.TensorStore:
    """Raises ValueError naming an array that is missing."""
    try:
        # Else what a download left out would read as zeros. The price: an array with a
        # chunk of nothing but zeros, which some writers leave out, is refused as well.
        return ts.open(spec | {"fill_missing_data_reads": False}, open=True).result()
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {_reason(error)}") from error


def open_array(spec: dict[str, Any], name: str, *, dtypes: Sequence[str] = FLOATS) -> Tensor:
    """Raises ValueError naming an array that is missing or of none of these types."""
    store = open_store(spec, name)
    dtype = jnp.dtype(store.dtype.numpy_dtype)
    if dtype.name not in dtypes:
        old = " (T5X before 2022 kept bfloat16 so)" if dtype.name == "uint16" else ""
        raise ValueError(f"{name} is stored as {dtype.name}{old}; supported are "
                         f"{', '.join(dtypes)}")

    def read() -> np.ndarray:
        try:
            return np.asarray(store.read().result())
        except ValueError as error:
            raise ValueError(f"{name} cannot be read: {_reason(error)}") from error

    return Tensor(tuple(store.shape), dtype, read)


def _reason(error: Exception) -> str:
    """What TensorStore says, without the specification that it repeats."""
    return str(error).partition(" [")[0].partition("\n")[0]
