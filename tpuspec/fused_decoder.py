"""A draft whose decoder pass is one kernel: its weights, and the model that reads them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpuspec import mesh as mesh_lib
from tpuspec.config import T5Config
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kernels import DecoderWeights, bias_table, check_decoder_pass
from tpuspec.kv_cache import DecoderCache
from tpuspec.t5 import T5, KeysValues

# Names within a decoder layer of what the kernel reads.
_WEIGHTS = {
    "self_norm": "self_norm.weight", "cross_norm": "cross_norm.weight",
    "mlp_norm": "mlp_norm.weight", "qkv": "self_attention.qkv.weight",
    "self_o": "self_attention.o.weight", "cross_q": "cross_attention.q.weight",
    "cross_o": "cross_attention.o.weight", "wi": "mlp.wi.weight", "wo": "mlp.wo.weight"}
_SHARED = ("last_norm", "bias")


def parameter_names(params: nnx.State) -> list[str]:
    """Dotted names of a model's leaves, in their order."""
    return [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            for path, _ in jax.tree_util.tree_leaves_with_path(params)]


class StackedLayers:
    """A model's leaves, with one array of all decoder layers for each of their weights.

    The arrays take the leaves' place, so that HBM holds every layer once.

    Attributes:
      names: of ``stack``'s arrays.
    """

    def __init__(self, model: T5):
        """The model gives its structure only, and may be abstract."""
        self._graph, params = nnx.split(model)
        self._structure = jax.tree.structure(params)
        names, leaves = parameter_names(params), jax.tree.leaves(params)
        self._shapes = [leaf.shape for leaf in leaves]
        self._stacks = {
            field: [names.index(f"decoder_layers.{layer}.{name}")
                    for layer in range(model.config.num_decoder_layers)]
            for field, name in _WEIGHTS.items()}
        stacked = {index for indices in self._stacks.values() for index in indices}
        self._kept = [index for index in range(len(names)) if index not in stacked]
        self.names = [names[index] for index in self._kept]
        self.names += [f"decoder_layers.{field}" for field in (*self._stacks, *_SHARED)]

    def stack(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves that are no layer's, the stacks, and what the kernel reads of the
        others in its own form."""
        stacks = [jnp.stack([leaves[i].reshape(-1, leaves[i].shape[-1]) for i in indices])
                  for indices in self._stacks.values()]
        model = nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))
        shared = [model.decoder_norm.weight[...][None],
                  bias_table(model.decoder_bias_by_distance())]
        return [*(leaves[index] for index in self._kept), *stacks, *shared]

    def unstack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], DecoderWeights]:
        """The leaves, those of layers as slices, and the stacks. Inside a program, a slice
        that nothing reads is no copy."""
        count = len(self._kept)
        leaves = dict(zip(self._kept, arrays[:count], strict=True))
        stacks = dict(zip((*self._stacks, *_SHARED), arrays[count:], strict=True))
        for field, indices in self._stacks.items():
            leaves |= {index: stacks[field][layer].reshape(self._shapes[index])
                       for layer, index in enumerate(indices)}
        return [leaves[index] for index in sorted(leaves)], DecoderWeights(**stacks)


def stacked_layers(model: T5, cache: DecoderCache, window: int,
                   kernels: KernelChoice) -> StackedLayers | None:
    """How to keep a model's weights for the decoder kernel; None where it does not take
    the model.

    Args:
      model: may be abstract.
      cache: shapes, stacked.
      window: positions of its longest pass.
    """
    config = model.config
    if config.quantization is not None or config.per_layer_relative_bias:
        return None
    layers = StackedLayers(model)
    parts = 1 if kernels.mesh is None else kernels.mesh.shape[mesh_lib.DATA]
    slots, dtype = cache.self_k[0].shape[1] // parts, model.embedding.get_value().dtype

    def share(keys: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((keys.shape[0], slots, *keys.shape[2:]), keys.dtype)

    *_, weights = jax.eval_shape(
        lambda leaves: layers.unstack(layers.stack(leaves)), jax.tree.leaves(nnx.state(model)))
    try:
        check_decoder_pass(
            jax.ShapeDtypeStruct((slots, window, config.d_model), dtype), weights,
            share(cache.self_k[0]), share(cache.cross_k[0]), interpret=kernels.interpret)
    except NotImplementedError:  # for instance layers that do not fit in the VMEM
        return None
    return layers


@dataclasses.dataclass(frozen=True)
class FusedT5:
    """A T5 whose decoder reads its stacked weights by one kernel."""

    model: T5
    weights: DecoderWeights

    @property
    def config(self) -> T5Config:
        return self.model.config

    def encode(self, tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"],
               ) -> Float[Array, "B S D"]:
        """See ``T5``."""
        return self.model.encode(tokens_BS, lengths_B)

    def cross_keys_values(self, encoded_BSD: Float[Array, "B S D"]) -> tuple[KeysValues, ...]:
        """See ``T5``."""
        return self.model.cross_keys_values(encoded_BSD)

    def decode(self, tokens_BG: Int[Array, "B G"], start_B: Int[Array, " B"],
               source_lengths_B: Int[Array, " B"], cache: DecoderCache,
               row_B: Int[Array, " B"] | None, kernels: KernelChoice,
               ) -> tuple[Float[Array, "B R V"], DecoderCache]:
        """See ``T5``; the cache is stacked."""
        model = self.model
        arrays = [*cache.self_k, *cache.self_v, *cache.cross_k, *cache.cross_v]
        x, k, v = kernels.decoder_pass(
            self.config, model.embed(tokens_BG), self.weights, *arrays, start_B,
            source_lengths_B)
        return model.logits(x, row_B), dataclasses.replace(cache, self_k=(k,), self_v=(v,))


Model = T5 | FusedT5
