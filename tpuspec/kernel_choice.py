"""Which implementation of the kernels a program uses, and on which mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from tpuspec import kernels
from tpuspec import mesh as mesh_lib
from tpuspec.config import T5Config
from tpuspec.kernels.implementation import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """Passed to every program when it is made.

    Attributes:
      implementation: "xla" is plain jnp everywhere; "pallas" the TPU kernels, for the
        models whose heads they take.
      interpret: runs the kernels on the CPU: slow, for tests.
      mesh: devices that heads and slots are split over.
    """

    implementation: Implementation = "xla"
    interpret: bool = False
    mesh: Mesh | None = None

    @classmethod
    def default(cls, mesh: Mesh | None) -> "KernelChoice":
        """The kernels on a TPU, XLA elsewhere."""
        return cls(implementation="pallas" if jax.default_backend() == "tpu" else "xla", mesh=mesh)

    def tiles(self, config: T5Config) -> bool:
        """Whether a model's caches have the kernels' layout (see ``kernels.attention_blocks``)."""
        if self.implementation != "pallas":
            return False
        split = self.mesh is not None and mesh_lib.divides(config, self.mesh)
        parts = self.mesh.shape[mesh_lib.MODEL] if self.mesh is not None and split else 1
        try:
            kernels.tiled_cache_shape(slots=1, positions=1, head_width=config.d_kv,
                                      num_heads=config.num_heads // parts)
        except NotImplementedError:
            return False
        return True

    def verify_attention(self, config: T5Config, *arrays: jax.Array,
                         ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See ``kernels.verify_attention``."""
        options: dict[str, Any] = dict(implementation="pallas", interpret=self.interpret)
        if self.mesh is None:
            return kernels.verify_attention(*arrays, **options)
        return kernels.sharded_verify_attention(
            self.mesh, heads=self._heads(config), slots=mesh_lib.DATA, **options)(*arrays)

    def cross_attention(self, config: T5Config, *arrays: jax.Array) -> jax.Array:
        """See ``kernels.cross_attention``."""
        options: dict[str, Any] = dict(
            implementation="pallas", interpret=self.interpret, head_width=config.d_kv)
        if self.mesh is None:
            return kernels.cross_attention(*arrays, **options)
        return kernels.sharded_cross_attention(
            self.mesh, heads=self._heads(config), slots=mesh_lib.DATA, **options)(*arrays)

    def decoder_pass(self, config: T5Config, *arrays: Any,
                     ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See ``kernels.decoder_pass``."""
        options: dict[str, Any] = dict(
            activation=config.activation.value, epsilon=config.layer_norm_epsilon,
            implementation="pallas", interpret=self.interpret)
        if self.mesh is None:
            return kernels.decoder_pass(*arrays, **options)
        return kernels.sharded_decoder_pass(self.mesh, slots=mesh_lib.DATA, **options)(*arrays)

    def sample_tokens(self, *arrays: Any, vocabulary_size: int) -> kernels.SampledTokens:
        """See ``kernels.sample_tokens``."""
        return self._sample(kernels.sample_tokens, kernels.sharded_sample_tokens, *arrays,
                            vocabulary_size=vocabulary_size)

    def rejection_sample(self, *arrays: Any, vocabulary_size: int) -> kernels.RejectionSample:
        """See ``kernels.rejection_sample``."""
        return self._sample(kernels.rejection_sample, kernels.sharded_rejection_sample, *arrays,
                            vocabulary_size=vocabulary_size)

    def _sample(self, function: Callable[..., Any], sharded: Callable[..., Any], *arrays: Any,
                vocabulary_size: int) -> Any:
        """The kernel where it takes the shapes; on a mesh each device takes some slots. Plain
        jnp is left to the compiler, which can do with a split vocabulary."""
        options: dict[str, Any] = dict(vocabulary_size=vocabulary_size)
        if self.implementation == "pallas":
            chosen = options | dict(implementation="pallas", interpret=self.interpret)
            call = functools.partial(function, **chosen) if self.mesh is None else sharded(
                self.mesh, slots=(mesh_lib.DATA, mesh_lib.MODEL), **chosen)
            try:
                return call(*arrays)
            except NotImplementedError:  # for instance rows that do not fit in VMEM
                pass
        return function(*arrays, implementation="xla", **options)

    def _heads(self, config: T5Config) -> str | None:
        split = self.mesh is not None and mesh_lib.divides(config, self.mesh)
        return mesh_lib.MODEL if split else None


XLA = KernelChoice()
