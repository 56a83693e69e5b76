"""DAPO's and SPEED's bookkeeping without a model: rewards are drawn, rollouts only numbered."""

import json

import numpy as np
import pytest
from small_runs import small_config

from specrl_jax.recipes.waiting_groups import (
    KEPT,
    Group,
    GroupBuffer,
    WaitingGroups,
    pick_rows,
)

Q, G, N = 4, 8, 2
DAPO = {"algorithm.dynamic_sampling": True}
SPEED = {"curriculum.name": "speed", "curriculum.screening": N}


def buffer_of(changes: dict, total_prompts: int = 1000) -> GroupBuffer:
    return GroupBuffer(small_config(changes), total_prompts)


class Play:
    """Steps of a buffer on prompts "p0", "p1", ... in turn, and who was where."""

    def __init__(self, buffer: GroupBuffer, seed: int = 0, chance: float = 0.7):
        self.buffer = buffer
        self.rng, self.chance = np.random.default_rng(seed), chance
        self.prompts = 0
        self.owners: list[list[tuple[str, int]]] = [[]]  # (prompt_id, sample) by rollout and row
        self.rewards: dict[tuple[str, int], float] = {}
        self.begun: dict[str, int] = {}  # the step in which a prompt was started
        self.steps = 0

    def rollout(self) -> list[str]:
        buffer, part = self.buffer, self.buffer.part_size
        names = [f"p{self.prompts + i}" for i in range(buffer.num_new_prompts)]
        self.prompts += len(names)
        self.begun |= dict.fromkeys(names, self.steps)
        samples = [(name, 0) for name in names]
        samples += [(name, first) for first in buffer.first_samples for name in buffer.to_finish]
        rewards = (self.rng.random((len(samples), part)) < self.chance).astype(np.float32)
        owners = [(name, first + i) for name, first in samples for i in range(part)]
        self.owners.append(owners)
        self.rewards |= dict(zip(owners, rewards.reshape(-1).tolist(), strict=True))
        ids = [f"{name}+{first}" if first else name for name, first in samples]
        buffer.add([name for name, _ in samples], rewards, rewards > 0)
        return ids

    def step(self) -> tuple[list[Group], dict, list[list[str]]]:
        self.steps += 1
        rollouts = []
        while self.buffer.wants_rollout():
            rollouts.append(self.rollout())
        groups, values = self.buffer.take_batch("filler")
        for group in groups + self.buffer.ready + list(self.buffer.unfinished.values()):
            self.check(group)
        kept = self.buffer.keep()
        assert kept.shape == (self.buffer.max_waiting_rows, 2)
        self.owners = [[self.owners[r][i] if r >= 0 else None for r, i in kept.tolist()]]
        for group in self.buffer.ready + list(self.buffer.unfinished.values()):
            self.check(group)
        return groups, values, rollouts

    def check(self, group: Group) -> None:
        """A group's row ids are of its own responses, in order, with their rewards."""
        owners = [self.owners[rollout][row] for rollout, row in group.row_ids]
        trained = WaitingGroups.trained_group_size(self.buffer.config)
        starts = G - trained if len(owners) == trained else 0
        assert owners == [(group.prompt_id, starts + i) for i in range(len(owners))]
        assert group.rewards == tuple(self.rewards[owner] for owner in owners)
        assert group.ended == tuple(reward > 0 for reward in group.rewards)

    def all_rewards(self, name: str) -> list[float]:
        return [x for (owner, _), x in sorted(self.rewards.items()) if owner == name]


def test_dapo_trains_on_every_group_with_signal_once_in_order():
    play, trained, waiting = Play(buffer_of(DAPO), chance=0.8), [], []
    for _ in range(30):
        groups, values, rollouts = play.step()
        assert values["rollout/gen_batches"] == len(rollouts)
        assert values["rollout/groups_waiting"] == len(play.buffer.ready) < Q
        assert values["rollout/groups_filled"] == 0
        assert "curriculum/waiting" not in values
        assert all(len(ids) == Q for ids in rollouts)
        waiting += [group for group in groups if group.row_ids[0][0] == KEPT]
        trained += [group.prompt_id for group in groups]
    names = [f"p{i}" for i in range(play.prompts)]
    with_signal = [name for name in names if 0 < sum(play.all_rewards(name)) < G]
    assert trained + [group.prompt_id for group in play.buffer.ready] == with_signal
    assert waiting
    assert len(trained) == 30 * Q


def test_a_batch_that_cannot_be_filled_gets_groups_without_signal_then_empty_ones():
    play = Play(buffer_of(DAPO | {"algorithm.max_gen_batches": 2}), chance=1.0)
    groups, values, rollouts = play.step()
    assert len(rollouts) == 2
    assert values["rollout/groups_filled"] == Q
    assert [group.prompt_id for group in groups] == ["p0", "p1", "p2", "p3"]
    one = buffer_of(DAPO | {"rollout.prompts_per_step": 6})
    solved = np.array([[1] * G, [0, 1] * (G // 2)], np.float32)
    one.add(["a", "b"], solved, solved > 0)
    groups, values = one.take_batch("filler")
    assert [group.prompt_id for group in groups] == ["b", "a", *["filler"] * 4]
    assert values["rollout/groups_filled"] == 5
    row_ids, rewards, ended = pick_rows(groups, G)
    np.testing.assert_array_equal(row_ids[: 2 * G, 1], [*range(G, 2 * G), *range(G)])
    assert set(row_ids[2 * G :, 0]) == {-1}
    np.testing.assert_array_equal(rewards[: 2 * G], [*[0, 1] * (G // 2), *[1] * G])
    np.testing.assert_array_equal(rewards[2 * G :], 0)
    np.testing.assert_array_equal(ended, [*[False, True] * (G // 2), *[True] * 5 * G])


def test_rollouts_end_where_prompts_run_out():
    play = Play(buffer_of(DAPO, total_prompts=2 * Q + 1), chance=1.0)
    _, _, rollouts = play.step()
    assert len(rollouts) == 2


@pytest.mark.parametrize("trained", [G, G - N], ids=["reused", "to choose prompts alone"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_speed_finishes_the_groups_whose_screening_was_mixed_and_no_others(trained, dynamic):
    changes = SPEED | {"curriculum.reuse_screening": trained == G}
    buffer = buffer_of(changes | {"algorithm.dynamic_sampling": dynamic})
    play, order, stale, mixed_rollouts = Play(buffer), [], 0, 0
    for _ in range(30):
        groups, values, rollouts = play.step()
        for ids in rollouts:
            assert len(ids) * N == Q * G  # every rollout has as many rows
            assert len(set(ids)) == len(ids)
            mixed_rollouts += 0 < sum("+" in name for name in ids) < len(ids)
        order += [x.prompt_id for x in groups if not dynamic or len(set(x.rewards)) > 1]
        stale += sum(play.begun[group.prompt_id] < play.steps for group in groups)
        assert all(len(group.rewards) == trained for group in groups)
        assert values["curriculum/waiting"] == len(play.buffer.unfinished)
    names = [f"p{i}" for i in range(play.prompts)]
    mixed = [name for name in names if 0 < sum(play.all_rewards(name)[:N]) < N]
    finished = [name for name in names if len(play.all_rewards(name)) == G]
    assert finished == mixed[: len(finished)]
    learnt = [
        name for name in finished if not dynamic or len(set(play.all_rewards(name)[-trained:])) > 1
    ]
    assert order + [group.prompt_id for group in play.buffer.ready] == learnt
    assert list(play.buffer.unfinished) == mixed[len(finished) :]
    assert stale
    assert mixed_rollouts


def test_screening_is_counted_and_bounded():
    play = Play(buffer_of(SPEED), chance=0.5)
    _, values, rollouts = play.step()
    begun = [name for ids in rollouts for name in ids if "+" not in name]
    assert values["curriculum/screened"] == len(begun)
    mixed = [name for name in begun if 0 < sum(play.all_rewards(name)[:N]) < N]
    assert values["curriculum/kept"] == len(mixed) / len(begun)
    # Where no finished group ever has signal, started ones pile up: two rollouts of them at most.
    play = Play(buffer_of(SPEED | DAPO | {"curriculum.reuse_screening": False}))
    play.rng = _Screened()
    for _ in range(4):
        play.step()
        assert len(play.buffer.unfinished) <= 2 * Q * G // N


class _Screened:
    """Noise in which first parts are mixed and nothing else has signal."""

    def random(self, shape: tuple[int, int]) -> np.ndarray:
        return np.tile([0.0, 1.0], (shape[0], 1))


@pytest.mark.parametrize("changes", [DAPO, SPEED], ids=["dapo", "speed"])
def test_a_restored_buffer_goes_on_alike(changes):
    whole, first = (Play(buffer_of(changes), seed=3) for _ in range(2))
    for _ in range(5):
        whole.step()
        first.step()
    host = json.loads(json.dumps(first.buffer.host()))
    first.buffer = buffer_of(changes).restore(host, None)
    assert first.buffer.host() == whole.buffer.host()
    for _ in range(5):
        assert first.step() == whole.step()
