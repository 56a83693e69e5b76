"""Kernels: which ones a run uses instead of the plain reference (`ModelConfig.kernels`).

The choice follows a rule, not timings: every start of a run computes the same bits.
"""

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.head import KERNEL, folded_rows
from specrl_jax.sharding import platform, shards

# What a kernel may do, by its name in `ModelConfig.kernels`: attend over the tokens of the cache
# (decode and wide steps), or of packed sequences (update and `prefill`).
USES = ("cached", "packed")


def choose_kernels(setting: str, model: ModelConfig, slots: int) -> tuple[str, ...]:
    """Return the attention and output-head kernels that a run uses.

    Arguments: see `choose_attention_kernels`.
    """
    attention = choose_attention_kernels(setting, model, slots)
    return attention + choose_head_kernel(setting, model)


def choose_attention_kernels(setting: str, model: ModelConfig, slots: int) -> tuple[str, ...]:
    """Return those of `USES` for which a run uses a kernel; print a line for each.

    setting: `model.attention`: `auto` uses the platform's kernels if they support the shape,
      `kernel` raises a one-line ValueError if one does not, `reference` uses none.
    slots: Of the longest cache.
    """
    kernels = kernel_module(platform())
    if kernels is None and setting == "kernel":
        raise ValueError(
            f"model.attention must be auto or reference on {platform()}, which has no kernels, "
            "got 'kernel'"
        )
    if kernels is None or setting == "reference":
        return ()
    refusals = {use: kernels.refusal(use, model, slots) for use in USES}
    for use, refusal in refusals.items():
        if refusal and setting == "kernel":
            raise ValueError(
                f"model.attention must be auto or reference for this model, got 'kernel': for "
                f"{use} tokens, {refusal}"
            )
        taken = f"reference ({refusal})" if refusal else "kernel"
        print(f"attention over {use} tokens: {taken}", flush=True)
    return tuple(use for use, refusal in refusals.items() if not refusal)


def kernel_module(name: str):
    """Return a platform's kernels, imported on first use; None if it has none."""
    if name == "tpu":
        from specrl_jax.models import attention_tpu

        return attention_tpu
    if name in ("gpu", "cuda"):
        from specrl_jax.models import attention_gpu

        return attention_gpu
    return None


def choose_head_kernel(setting: str, model: ModelConfig) -> tuple[str, ...]:
    """Return `KERNEL` if a run uses the kernel for the head, else nothing; print a line.

    setting: `model.attention`; `reference` uses no kernel. `kernel` applies to attention only.
    """
    if platform() not in ("gpu", "cuda") or setting == "reference":
        return ()
    from specrl_jax.models import head_gpu

    rows = folded_rows(model.vocab_size)
    pieces = shards("vocab")
    refusal = head_gpu.refusal(model, rows // pieces)
    if rows % pieces:
        refusal = f"columns of {rows} tokens cannot be split over {pieces} devices"
    taken = f"reference ({refusal})" if refusal else "kernel"
    print(f"output head: {taken}", flush=True)
    return () if refusal else (KERNEL,)
