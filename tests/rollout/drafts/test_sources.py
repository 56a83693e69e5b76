"""Draft sources of a user's own: they change no token, whatever they propose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from small_runs import small_config

from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftChoice, DraftSource
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.sharding import put, reshard
from specrl_jax.types import Source


class RepeatLast(DraftSource):
    """The row's last token, again and again; needs no state."""

    def propose(self, state, rows, width):
        tokens = jnp.repeat(rows.last[:, None], width, axis=1)
        return tokens, jnp.full_like(rows.lens, width)


@dataclasses.dataclass(frozen=True)
class Bigrams(DraftSource):
    """What followed each token last in the row's prompt and response (prompt lookup)."""

    vocab: int = 16

    def init(self, prompts, history, group_size):
        table = np.full((len(prompts.lens), self.vocab), -1, np.int32)
        for row, tokens, length in zip(table, prompts.tokens, prompts.lens):
            row[tokens[: length - 1]] = tokens[1:length]
        return put(np.repeat(table, group_size, axis=0), None, None)

    def propose(self, state, rows, width):
        index = jnp.minimum(reshard(rows.row_ids, None), len(state) - 1)
        table, tokens = state[index], [reshard(rows.last, None)]
        for _ in range(width):
            following = jnp.take_along_axis(table, jnp.maximum(tokens[-1], 0)[:, None], axis=1)
            tokens.append(jnp.where(tokens[-1] < 0, -1, following[:, 0]))
        tokens = jnp.stack(tokens[1:], axis=1)
        counts = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
        return reshard(jnp.maximum(tokens, 0), "batch", None), reshard(counts, "batch")

    def observe(self, state, rows, tokens, counts):
        before = jnp.concatenate([rows.last[:, None], tokens[:, :-1]], axis=1)
        return _write(state, rows.row_ids, before, tokens, counts)

    def sync(self, state, tokens, lens):
        index = jnp.arange(len(state))
        return jax.jit(_write)(state, index, tokens[:, :-1], tokens[:, 1:], lens - 1)


def _write(state, index, before, after, counts):
    index, counts = reshard(index, None), reshard(counts, None)
    before, after = reshard(before, None, None), reshard(after, None, None)
    valid = jnp.arange(after.shape[1])[None, :] < counts[:, None]
    rows = jnp.where(valid, index[:, None], len(state))  # dropped, as padding rows are
    return state.at[rows, before].set(after, mode="drop")


@pytest.mark.parametrize("source", [RepeatLast(), Bigrams()], ids=lambda x: type(x).__name__)
def test_a_new_source_changes_no_token_and_saves_steps(make_mesh, source):
    spec = ref.make_spec(accept="match", slots=24, eos=(16,))
    drafted = ref.make_spec(accept="match", slots=24, eos=(16,), tree=source, max_width=3)
    with jax.set_mesh(make_mesh(2, 1, 2)):
        (_, weights), prompts = ref.policy(), ref.random_prompts()
        plain, steps = ref.run(spec, weights, prompts)
        rollout, stats = ref.run(drafted, weights, prompts)
    ref.check_equal(rollout, plain, but=("sources",))
    assert stats.drafted_tokens == np.sum(np.asarray(rollout.tokens.sources) == Source.DRAFTED) > 20
    assert stats.decode_steps <= steps.decode_steps


def test_a_source_is_chosen_by_its_name(monkeypatch):
    monkeypatch.setitem(
        DRAFT_SOURCES, "repeat", DraftChoice(make_source=lambda settings: RepeatLast())
    )
    config = small_config({"rollout.draft": "repeat", "rollout.max_width": 3})
    spec = RolloutSpec.from_config(config, ref.MODEL, eos_ids=(1,), pad_id=0)
    assert spec.draft_source == RepeatLast()
    assert spec.accept.samples_every_token
    assert spec.max_width == 3
    assert spec.draft_history == 0
