"""Writers of the layouts that others save in, from a model of ours.

By the tables of those layouts, not by the code that reads them: from the tensors under
their Hugging Face names (``tensors_of``), which the golden files hold to account.
"""

import io
import itertools
import json
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from programmable import tensors_of

from tpuspec.t5 import T5

Arrays = Mapping[str, np.ndarray]

# PyTorch.

_STORAGE_OF = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
               "int64": "LongStorage"}


def _fake_torch() -> tuple[types.ModuleType, types.ModuleType]:
    """Modules with what a PyTorch pickle names."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def rebuild(*_: Any) -> None:
        raise AssertionError("only named in a pickle")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    rebuild.__name__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild
    for name in _STORAGE_OF.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    return torch, utils


def pickled(tensors: Arrays) -> tuple[bytes, dict[str, np.ndarray]]:
    """The pickle of a state dictionary, and its storages by key. The same array under two
    names is one storage; a transposed array is a transposed view."""
    torch, utils = _fake_torch()
    storages: dict[str, np.ndarray] = {}
    keys: dict[int, str] = {}

    class Storage:
        def __init__(self, array: np.ndarray):
            self.key = keys.setdefault(id(array), str(len(keys)))
            base = array if array.flags.c_contiguous else array.T
            assert base.flags.c_contiguous
            storages[self.key] = base.ravel()

    class Tensor:
        def __init__(self, array: np.ndarray):
            self.array = array

        def __reduce__(self):
            strides = tuple(step // self.array.itemsize for step in self.array.strides)
            return utils._rebuild_tensor_v2, (
                Storage(self.array), 0, self.array.shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if not isinstance(item, Storage):
                return None
            flat = storages[item.key]
            return ("storage", getattr(torch, _STORAGE_OF[flat.dtype.name]), item.key, "cpu",
                    flat.size)

    stream = io.BytesIO()
    before = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        Pickler(stream, 2).dump(OrderedDict((n, Tensor(a)) for n, a in tensors.items()))
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return stream.getvalue(), storages


def write_torch_zip(file: Path, tensors: Arrays, *, program: bytes | None = None) -> None:
    """As PyTorch writes since 1.6; ``program`` instead of the pickle."""
    content, storages = pickled(tensors)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program or content)
        for key, flat in storages.items():
            archive.writestr(f"archive/data/{key}", flat.tobytes())
        archive.writestr("archive/version", "3\n")


def write_torch_old(file: Path, tensors: Arrays) -> None:
    """As PyTorch wrote before 1.6: four pickles, the keys, then the storages."""
    content, storages = pickled(tensors)
    with file.open("wb") as stream:
        for item in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001,
                                                    "little_endian": True, "type_sizes": {}}):
            pickle.dump(item, stream, protocol=2)
        stream.write(content)
        pickle.dump(sorted(storages), stream, protocol=2)
        for key in sorted(storages):
            stream.write(struct.pack("<q", storages[key].size) + storages[key].tobytes())


# T5X.


def t5x_arrays(model: T5, form: str) -> dict[str, np.ndarray]:
    """A model's arrays under T5X's dotted names.

    Args:
      form: "joined" (minimal T5X, flaxformer), "split" (flaxformer with heads apart),
        "scanned" (scalable T5X: layers along axis 1, heads apart), or "scanned_joined".
    """
    config, theirs = model.config, tensors_of(model)
    heads = form in ("split", "scanned")

    def kernel(name: str, *, split: str = "") -> np.ndarray:
        array = theirs[name + ".weight"].T
        if heads and split == "out":
            return array.reshape(array.shape[0], config.num_heads, config.d_kv)
        if heads and split == "in":
            return array.reshape(config.num_heads, config.d_kv, array.shape[1])
        return array

    made = {"token_embedder.embedding": theirs["shared.weight"]}
    if not config.tie_word_embeddings:
        made["decoder.logits_dense.kernel"] = theirs["lm_head.weight"].T
    for stack, depth in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        made[f"{stack}.{stack}_norm.scale"] = theirs[f"{stack}.final_layer_norm.weight"]
        attentions = [("attention" if stack == "encoder" else "self_attention", "SelfAttention",
                       "attention" if stack == "encoder" else "self_attention")]
        if stack == "decoder":
            attentions.append(("encoder_decoder_attention", "EncDecAttention", "cross_attention"))
        layers = []
        for i in range(depth):
            block, layer = f"{stack}.block.{i}.layer.", {}
            for j, (name, class_name, norm) in enumerate(attentions):
                for long, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                    layer[f"{name}.{long}.kernel"] = kernel(
                        f"{block}{j}.{class_name}.{letter}", split="in" if letter == "o" else "out")
                layer[f"pre_{norm}_layer_norm.scale"] = theirs[f"{block}{j}.layer_norm.weight"]
            last = f"{block}{len(attentions)}."
            for wi in ("wi_0", "wi_1", "wo") if config.activation.gated else ("wi", "wo"):
                layer[f"mlp.{wi}.kernel"] = kernel(f"{last}DenseReluDense.{wi}")
            layer["pre_mlp_layer_norm.scale"] = theirs[f"{last}layer_norm.weight"]
            bias = theirs.get(f"{block}0.SelfAttention.relative_attention_bias.weight")
            if config.per_layer_relative_bias:
                layer["relpos_bias.rel_embedding"] = bias.T
            elif i == 0:
                made[f"{stack}.relpos_bias.rel_embedding"] = bias.T
            layers.append(layer)
        if form.startswith("scanned"):
            made |= {f"{stack}.{stack}.{name}": np.stack([layer[name] for layer in layers], axis=1)
                     for name in layers[0]}
        else:
            made |= {f"{stack}.layers_{i}.{name}": array for i, layer in enumerate(layers)
                     for name, array in layer.items()}
    return made


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root


def packed(array: np.ndarray) -> msgpack.ExtType:
    """An array as flax puts it into msgpack."""
    return msgpack.ExtType(1, msgpack.packb(
        (array.shape, array.dtype.name, np.ascontiguousarray(array).tobytes())))


def write_t5x(path: Path, arrays: Arrays, *, inline: int = 100, old_specs: bool = False,
              version: int | None = 3) -> Path:
    """T5X's own form: arrays beyond ``inline`` numbers in gzip'd zarr, the rest in msgpack."""
    path.mkdir(parents=True)
    target: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.size <= inline:
            target[name] = packed(array)
            continue
        folder = f"target.{name}/"
        metadata = {"shape": list(array.shape), "compressor": {"id": "gzip", "level": 1},
                    "chunks": [-(-n // 2) for n in array.shape],
                    "dtype": "bfloat16" if array.dtype == ml_dtypes.bfloat16
                    else array.dtype.str}
        ts.open({"driver": "zarr", "metadata": metadata, "store_data_equal_to_fill_value": True,
                 "kvstore": {"driver": "file", "path": str(path / folder)}},
                create=True).result()[...] = array
        spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata,
                "kvstore": {"driver": "gfile", "path": folder}}
        if old_specs:
            spec |= {"kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"}, "path": folder}
        target[name] = spec
    state = {"step": msgpack.ExtType(3, msgpack.packb(((), "int32", b"\0\0\0\0"))),
             "param_states": {"token_embedder": {"m": None}}}
    tree = {"version": version, "optimizer": {"state": state, "target": nested(target) | {
        "__save_format_metadata__": {"version": 1}}}}
    (path / "checkpoint").write_bytes(msgpack.packb(tree))
    return path


def write_t5x_orbax(path: Path, arrays: Arrays, *, ocdbt: bool) -> Path:
    """What T5X saves through Orbax, with the optimizer's state beside the model."""
    tree = {"step": np.zeros((), np.int32), "target": nested(arrays),
            "state": {"param_states": {"m": np.ones((3,), np.float32)}}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.Checkpointer(handler) as writer:
        writer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def write_shards(path: Path, tensors: Arrays, write: Any, single: str, shards: int = 2) -> None:
    """Tensors in several files and the index of Hugging Face's layout."""
    stem, suffix = single.rsplit(".", 1)
    names, index = list(tensors), {}
    for i, part in enumerate(itertools.batched(names, -(-len(names) // shards))):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}"
        write(path / file, {name: tensors[name] for name in part})
        index |= dict.fromkeys(part, file)
    (path / f"{single}.index.json").write_text(json.dumps({"weight_map": index}))
