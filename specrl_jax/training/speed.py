"""Speed and memory use of a step, and the run's tokens and seconds so far."""

from collections.abc import Mapping

import jax

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import used_param_count
from specrl_jax.process import chips
from specrl_jax.training.run import Run
from specrl_jax.training.state import RunState


def speed_metrics(run: Run, state: RunState, values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a finished step, which is included in the totals of `state`.

    values: the step's other metrics and seconds.
    """
    generated = values["rollout/tokens_generated"]
    step_seconds = values["time/step"]
    metrics = {
        "data/tokens_generated": state.tokens_generated,
        "time/total": state.seconds,
        "speed/tokens": (generated + values["rollout/tokens_reused"]) / step_seconds,
        "speed/tokens_generated": generated / values["time/rollout"],
    }
    devices = {*run.rollout_mesh.devices.flat, *jax.sharding.get_mesh().devices.flat}
    peak = sum(chips.peak_flops(device.device_kind) for device in devices)
    if peak:
        metrics["speed/mfu"] = model_flops(run.model, values) / (step_seconds * peak)
    used = [x["peak_bytes_in_use"] for device in devices if (x := _memory(device))]
    if used:
        metrics["memory/peak"] = max(used) / 2**30
    return metrics


def model_flops(model: ModelConfig, values: Mapping[str, float]) -> float:
    """Return the FLOPs of a step with these metrics, as defined in `telemetry.metrics`."""
    count = used_param_count(model)
    if model.untied:  # the embeddings are looked up, not multiplied
        count -= model.vocab_size * model.embed_dim
    rollout = values["rollout/tokens_generated"] + values.get("rollout/tokens_verified", 0)
    # Frozen weights need no gradient of their own.
    update = 4 if model.lora else 6
    return count * (2 * rollout + update * values.get("update/tokens", 0))


def _memory(device: jax.Device) -> Mapping[str, int]:
    """Return the allocator's statistics for a device of this process; {} if there are none."""
    if device.process_index != jax.process_index():
        return {}
    stats = device.memory_stats() or {}
    return stats if "peak_bytes_in_use" in stats else {}
