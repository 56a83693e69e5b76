"""A run that recorded its rollouts, as batches for `update` and `selection`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from specrl_jax import runtime
from specrl_jax.build import Trainer, build
from specrl_jax.evaluation.saved_policy import run_config
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put, shards
from specrl_jax.types import Batch


class Recorded(NamedTuple):
    """A work directory's run, on the mesh of its config."""

    trainer: Trainer
    params: Params  # that training began with
    prompts: dict[str, list[int]]  # tokens by prompt_id, held-out ones too

    @classmethod
    def of(cls, workdir: Path) -> "Recorded":
        """Raises ValueError in one line."""
        config, prompts = run_config(workdir), {}
        runtime.start(config)
        trainer, params = build(config)
        for batch in (trainer.prompts, *(batch for batch, _ in trainer.held_out)):
            for example, tokens, length in zip(batch.examples, batch.tokens, batch.lens):
                prompts[example.prompt_id] = tokens[:length].tolist()
        return cls(trainer, params, prompts)

    def batch(
        self, records: list[dict], advantages: np.ndarray | None = None
    ) -> tuple[Batch, np.ndarray]:
        """Recorded responses as rows, and bool [B, R]: tokens that the step's policy drew itself.

        advantages: of whole responses, [records]; None: 0. Rows are added until all shards have
        as many.
        """
        size, slots = shards("batch"), max(len(record["token_ids"]) for record in records)
        rows = -(-len(records) // size) * size
        tokens = np.zeros((rows, max(map(len, self.prompts.values())) + slots), np.int32)
        prompt_lens, lens = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        old, drawn = np.zeros((rows, slots)), np.zeros((rows, slots), bool)
        for row, record in enumerate(records):
            prompt, response = self.prompts[record["prompt_id"]], record["token_ids"]
            prompt_lens[row], lens[row] = len(prompt), len(response)
            tokens[row, : len(prompt) + len(response)] = prompt + response
            logprobs = np.array(record["policy_logprobs"], np.float32)  # null becomes nan
            old[row, : len(response)] = np.nan_to_num(logprobs)
            own = np.array(record["origin_steps"]) == record["step"]
            own &= (np.array(list(record["sources"])) != "f") & np.isfinite(logprobs)
            drawn[row, : len(response)] = own
        of_rows = np.zeros(rows)
        of_rows[: len(records)] = 0 if advantages is None else advantages
        return place_rows(tokens, prompt_lens, lens, old, of_rows), drawn


def place_rows(
    tokens: np.ndarray, prompt_lens: np.ndarray, lens: np.ndarray, old_logprobs: np.ndarray,
    advantages: np.ndarray,
) -> Batch:  # fmt: skip
    """Rows on the device. advantages: [B], of whole responses."""
    of_tokens = np.broadcast_to(advantages[:, None], old_logprobs.shape)
    integers = (x.astype(np.int32) for x in (tokens, prompt_lens, lens))
    arrays = (*integers, *(x.astype(np.float32) for x in (old_logprobs, of_tokens)))
    return Batch(*(put(x, "batch", *(None,) * (x.ndim - 1)) for x in arrays))
