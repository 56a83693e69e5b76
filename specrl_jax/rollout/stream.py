"""A response as it is sampled, for a reader: the tokens of `generate`, a few at a time."""

from collections.abc import Iterator

import jax
import numpy as np

from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine.requests import DraftInputs, Requests
from specrl_jax.rollout.engine.rows import Noise, start_all_rows
from specrl_jax.rollout.engine.runner import ModelRunner
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.types import Prompts


def stream(
    spec: RolloutSpec, weights: Params, prompts: Prompts, noise: Noise, steps: int = 4
) -> Iterator[np.ndarray]:
    """New tokens of the first row, int32 [n], n <= `steps`, until its response ends.

    spec: without drafts, as of `RolloutSpec.for_evaluation`. prompts: as many as the mesh needs.
    """
    rows = len(prompts.lens) * spec.group_size
    buckets = spec.buckets(rows)
    program = spec.program_for(buckets)
    nothing = np.zeros(rows, np.int32)
    noise_steps = np.full(len(prompts.lens), noise.step)
    requests = Requests(prompts, noise_steps, rows, nothing, nothing > 0, nothing)
    all_rows = start_all_rows(program, prompts, noise, noise_steps)
    runner = ModelRunner(program, buckets, weights, all_rows, requests, DraftInputs())
    slots = buckets.slots(program.response_slots)
    batch = runner.prefill(np.arange(rows), slots, with_drafts=False)
    seen = 0
    done = False
    while not done:
        runner.run(batch, runner.stop_condition(max_active=0, max_steps=steps), width=1)
        state = batch.rows
        read = jax.device_get((state.tokens, state.lens, state.done))
        tokens, length, done = (array[0] for array in read)
        yield tokens[seen:length]
        seen = length
