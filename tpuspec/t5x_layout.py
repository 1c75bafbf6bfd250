"""The names and shapes of T5X and flaxformer, mapped onto our parameters.

Kernels are stored [in, out], with heads apart ([in, heads, width]) or joined, and a
scanned model has its layers stacked along axis 1 of every array of a stack. All of it
is one rule: take the layer, flatten to [in, out], transpose.

No configuration comes with these files, so it is read off the shapes. What shapes do
not show (which gate; the ids of end and padding) is taken from the public model of the
same shapes, or else is T5 1.1's.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from tpuspec.checkpoint import check_leaves
from tpuspec.config import Activation, T5Config
from tpuspec.lazy_tensor import Tensor
from tpuspec.presets import same_shapes
from tpuspec.tensor_source import Part

_EMBEDDING, _HEAD = "token_embedder.embedding", "decoder.logits_dense.kernel"
_BIAS = "relpos_bias.rel_embedding"


def read_layout(tensors: Mapping[str, Tensor], source: str, activation: Activation | None,
                ) -> tuple[T5Config, dict[str, tuple[Part, ...]], tuple[str, ...]]:
    """The configuration, each parameter's parts, and what had to be guessed.

    Args:
      activation: overrides what the shapes suggest; None believes them.

    Raises:
      ValueError: naming missing, unexpected and misshaped tensors.
    """
    names = _Names(tensors)
    config, guesses = _configured(names, source, activation)
    parts: dict[str, tuple[Part, ...]] = {}
    wanted: dict[str, list[tuple[int, ...]]] = {}

    def add(ours: str, *theirs: tuple[str, int | None, tuple[int, ...], tuple[int, ...]]) -> None:
        """Each of theirs: name, layer if it is stacked, shape [in, out], heads apart."""
        for name, layer, joined, apart in theirs:
            wanted[name] = [shape if layer is None else (shape[0], names.depth(name), *shape[1:])
                            for shape in dict.fromkeys((joined, apart))]
        parts[ours] = tuple(Part(name, functools.partial(_take, layer, joined[0]))
                            for name, layer, joined, _ in theirs)

    E, J, F, V = config.d_model, config.inner_dim, config.d_ff, config.vocab_size
    N, H, buckets = config.num_heads, config.d_kv, config.relative_attention_num_buckets
    parts["embedding"], wanted[_EMBEDDING] = (Part(_EMBEDDING),), [(V, E)]
    if not config.tie_word_embeddings:
        add("lm_head.weight", (_HEAD, None, (E, V), (E, V)))
    attentions = {"encoder": (("attention", "attention", "attention", ("qkv", "o")),),
                  "decoder": (("self_attention", "self", "self_attention", ("qkv", "o")),
                              ("cross_attention", "cross", "encoder_decoder_attention",
                               ("q", "kv", "o")))}
    long = {"q": "query", "k": "key", "v": "value", "o": "out"}
    wide = ("wi_0", "wi_1") if config.activation.gated else ("wi",)
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        add(f"{stack}_norm.weight", (f"{stack}.{stack}_norm.scale", None, (E,), (E,)))
        for i in range(layers):
            ours, (theirs, at) = f"{stack}_layers.{i}.", names.layer(stack, i)
            for attention, short, class_name, maps in attentions[stack]:
                for letters in maps:
                    shapes = ((J, E), (N, H, E)) if letters == "o" else ((E, J), (E, N, H))
                    add(f"{ours}{attention}.{letters}.weight",
                        *((f"{theirs}{class_name}.{long[c]}.kernel", at, *shapes)
                          for c in letters))
                norm = {"attention": "attention", "self": "self_attention",
                        "cross": "cross_attention"}[short]
                add(f"{ours}{short}_norm.weight",
                    (f"{theirs}pre_{norm}_layer_norm.scale", at, (E,), (E,)))
            add(f"{ours}mlp.wi.weight",
                *((f"{theirs}mlp.{w}.kernel", at, (E, F), (E, F)) for w in wide))
            add(f"{ours}mlp.wo.weight", (f"{theirs}mlp.wo.kernel", at, (F, E), (F, E)))
            add(f"{ours}mlp_norm.weight", (f"{theirs}pre_mlp_layer_norm.scale", at, (E,), (E,)))
            if i == 0 or config.per_layer_relative_bias:
                own = theirs + _BIAS if config.per_layer_relative_bias else f"{stack}.{_BIAS}"
                add(f"{stack}_bias.{i}.weight", (own, at if names.scanned else None,
                                                 (N, buckets), (N, buckets)))
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_leaves(found, {name: found[name] if found.get(name) in shapes else shapes[0]
                         for name, shapes in wanted.items()}, source)
    return config, parts, guesses


def _take(layer: int | None, rows: int, array: np.ndarray) -> np.ndarray:
    if layer is not None:
        array = array[:, layer]
    return array if array.ndim == 1 else array.reshape(rows, -1).T


class _Names:
    """Which of the forms of names this is: layers counted, or stacked (scanned)."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        self.scanned = any(name.startswith("encoder.encoder.") for name in tensors)
        self.per_layer_bias = self.scanned or f"encoder.layers_0.{_BIAS}" in tensors

    def layer(self, stack: str, i: int) -> tuple[str, int | None]:
        return (f"{stack}.{stack}.", i) if self.scanned else (f"{stack}.layers_{i}.", None)

    def depth(self, name: str) -> int:
        """Layers in the stack that holds this tensor."""
        return self.layers(name.partition(".")[0])

    def layers(self, stack: str) -> int:
        if self.scanned:
            return self._shape(f"{stack}.{stack}.mlp.wo.kernel", 3)[1]
        numbers = (name.split(".")[1].removeprefix("layers_") for name in self.tensors
                   if name.startswith(f"{stack}.layers_"))
        return 1 + max((int(n) for n in numbers if n.isdecimal()), default=-1)

    def _shape(self, name: str, *ndims: int) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ValueError(f"missing {name}, from which the configuration would be read")
        shape = self.tensors[name].shape
        if len(shape) not in ndims:
            raise ValueError(f"misshaped {name}: {list(shape)}, wanted "
                             f"{' or '.join(map(str, ndims))} dimensions")
        return shape

    def of(self, part: str, *ndims: int) -> tuple[int, ...]:
        """The shape of a part of the encoder's first layer, without the axis of layers."""
        prefix, layer = self.layer("encoder", 0)
        if part == _BIAS and not self.per_layer_bias:
            return self._shape(f"encoder.{_BIAS}", 2)
        shape = self._shape(prefix + part, *(n + (layer is not None) for n in ndims))
        return shape if layer is None else (shape[0], *shape[2:])

    def embedding(self) -> tuple[int, ...]:
        return self._shape(_EMBEDDING, 2)


def _configured(names: _Names, source: str, activation: Activation | None,
                ) -> tuple[T5Config, tuple[str, ...]]:
    vocab_size, d_model = names.embedding()
    heads, buckets = names.of(_BIAS, 2)
    inner = int(np.prod(names.of("attention.query.kernel", 2, 3)[1:]))
    if inner % heads:
        raise ValueError(f"{source} has {heads} heads, which do not divide its {inner} queries")
    gated = any(name.endswith(".mlp.wi_0.kernel") for name in names.tensors)
    if activation is not None and activation.gated != gated:
        raise ValueError(f"activation must be {'gated' if gated else 'relu'} for the tensors of "
                         f"{source}, got {activation}")
    config = T5Config(
        vocab_size=vocab_size, d_model=d_model, d_kv=inner // heads,
        d_ff=names.of("mlp.wo.kernel", 2)[0], num_heads=heads,
        num_layers=names.layers("encoder"), num_decoder_layers=names.layers("decoder"),
        activation=activation or (Activation.GATED_GELU if gated else Activation.RELU),
        tie_word_embeddings=_HEAD not in names.tensors,
        per_layer_relative_bias=names.per_layer_bias, relative_attention_num_buckets=buckets)
    public = same_shapes(config)
    if public:
        choices = {(p.activation, p.eos_token_id, p.pad_token_id) for p in public.values()}
        if len(choices) == 1:
            gate, eos, pad = choices.pop()
            return dataclasses.replace(config, activation=activation or gate, eos_token_id=eos,
                                       pad_token_id=pad), ()
    guesses = (["no public model has these shapes: end of sequence is taken to be 1 and "
                "padding 0"]
               + [f"the gate is taken to be {config.activation}"]
               * (gated and activation is None))
    return config, tuple(guesses)
