"""Which implementation of the kernels a program uses, and on which mesh."""

import dataclasses
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

    def sampling(self) -> dict[str, Any]:
        """Options of ``kernels.sample_tokens`` and ``rejection_sample``. On a mesh the
        vocabulary is split, which the compiler's own partitioning handles."""
        if self.mesh is not None:
            return dict(implementation="xla")
        return dict(implementation=self.implementation, interpret=self.interpret)

    def _heads(self, config: T5Config) -> str | None:
        split = self.mesh is not None and mesh_lib.divides(config, self.mesh)
        return mesh_lib.MODEL if split else None


XLA = KernelChoice()
