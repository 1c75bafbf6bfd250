"""What steers the kernel of ``rejection_sample``."""

import jax.numpy as jnp

# What a slot needs done; each includes the ones before it but GREEDY.
DEAD, GREEDY, PLAIN, CUT, TRUNCATED = range(5)
INTS = 5  # of a slot, before its drafts


def prefetched_scalars(drafts_Bγ, draft_rows_Bγ, options, limit_B, active_B, accept_uniforms_Bγ,
                       next_uniforms_BG):
    """Slot after slot: integers and floats, in flat arrays."""
    temperature_B, top_k_B, top_p_B, min_p_B = options
    mode_B = jnp.where((top_k_B > 0) | (top_p_B < 1), TRUNCATED,
                       jnp.where(min_p_B > 0, CUT, PLAIN))
    mode_B = jnp.where(active_B, jnp.where(temperature_B == 0, GREEDY, mode_B), DEAD)
    # A slot that does not need its block names the one before, which is not fetched again.
    slot_B = jnp.arange(len(mode_B))
    before_BB = slot_B[:, None] >= slot_B[None, :]
    fetch = [jnp.max(jnp.where(before_BB & (mode_B >= least)[None, :], slot_B[None, :], 0), axis=1)
             for least in (GREEDY, PLAIN)]
    column = [x[:, None] for x in (*fetch, mode_B, top_k_B, limit_B)]
    ints = jnp.concatenate([*column, drafts_Bγ], axis=1).astype(jnp.int32)
    column = [x[:, None] for x in (temperature_B, top_p_B, min_p_B)]
    floats = jnp.concatenate(
        [*column, next_uniforms_BG, accept_uniforms_Bγ, *draft_rows_Bγ], axis=1)

    return ints.reshape(-1), floats.astype(jnp.float32).reshape(-1)
