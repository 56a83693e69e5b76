"""Parts of a run that every step changes: the content of a checkpoint.

A new part is a `types.StatePart`, which saves and restores its part of a checkpoint, a field of
`RolloutState` or `RunState`, and a line in `build._new_rollout_state` or `build._new_state`. A
collector is a separate part (`collect`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from specrl_jax import hosts
from specrl_jax.algorithms.update_spec import PolicyState
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params, rollout_weights
from specrl_jax.process.runtime import machine
from specrl_jax.responses import Responses
from specrl_jax.rollout.drafts.store import DraftStore
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.reused_noise import ReusedNoise
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.verification import Verification
from specrl_jax.sharding import move
from specrl_jax.training.origin import Reference, RunOrigin
from specrl_jax.training.run import Run
from specrl_jax.types import Drafts, Prompts, StatePart


@dataclasses.dataclass
class RolloutState:
    """Parts of the state that rollouts change, on the mesh of rollouts; None: the part is off.

    If rollouts have their own thread, only that thread touches these parts, and only the main
    thread touches the rest of `RunState`. The main thread saves all parts between two steps of the
    loop, while no rollout is running.
    """

    key: jax.Array  # of the run
    stream: PromptStream
    store: DraftStore
    reused_noise: ReusedNoise
    step: int = 0  # steps whose rollouts are done; during a step's rollouts, its number
    epoch: int = 0  # pass over the prompts, from 1, of the first prompt of `step`
    speculation: Speculation | None = None  # if widths of decode steps are chosen
    verification: Verification | None = None  # if drafts to verify are chosen
    collector: Any = None  # `collect.Collector`, or a recipe's

    def start_step(self) -> None:
        """Start the rollouts of the next step."""
        self.step += 1
        self.epoch = self.prompts_seen // self.stream.prompts_per_epoch + 1
        self.stream.start_step(self.step)

    def noise_key(self, prompts: Prompts) -> NoiseKey:
        """Return the noise of a rollout of `prompts` in this step."""
        noise_steps = self.reused_noise.noise_steps(prompts, self.step)
        return NoiseKey(self.key, self.step, noise_steps=noise_steps)

    def store_responses(
        self, responses: Responses, requests: Requests, previous: Drafts
    ) -> Responses:
        """Store a rollout's responses; return them with the previous responses and noise marks.

        The responses are their prompts' next drafts. Their rewards determine the next prompts and
        the samples that reuse their noise.

        previous: the previous responses of all requested rows.
        """
        rewards = responses.group_rewards
        self.store.put(responses.prompts, responses.rollout, step=self.step)
        self.collector.observe(self, responses)
        noise_steps = requests.noise.noise_steps[responses.groups]
        kept = self.reused_noise.observe(responses.prompts, noise_steps, rewards)
        tokens, lens = hosts.fetch((previous.tokens.ids, previous.lens))
        rows = responses.row_ids
        return dataclasses.replace(
            responses, previous=(tokens[rows], lens[rows]), on_reused_noise=kept.reshape(-1)
        )

    @property
    def prompts_seen(self) -> int:
        """Prompts whose rollout is complete, counting repeats."""
        return self.stream.given - self.collector.prompts_waiting


@dataclasses.dataclass
class RunState:
    """Content of a checkpoint: finished steps, weights with optimizer, parts; None: off."""

    policy_state: PolicyState
    rollout: RolloutState
    batches: Any  # `batches.BatchSource`, or a recipe's
    origin: RunOrigin
    step: int = 0  # finished steps; during a step, its number
    skipped_in_row: int = 0  # updates skipped in a row, see updates.skip_nonfinite
    tokens_generated: int = 0  # in all finished steps
    seconds: float = 0.0  # of all finished steps, without evaluations and checkpoints
    # The policy's learning rates: the last update's and the next one's by the schedule.
    rates: tuple[float, float] | None = None
    reference: Reference | None = None  # with a KL penalty, and with adapters

    @property
    def parts(self) -> dict[str, StatePart]:
        """Parts that are on, by name."""
        named = vars(self.rollout) | vars(self)
        return {name: part for name, part in named.items() if isinstance(part, StatePart)}

    @property
    def updates(self) -> int:
        """Number of updates made to the policy."""
        (_, count), *_ = optax.tree.get_all_with_path(self.policy_state.policy.opt_state, "count")
        return int(hosts.fetch(count))

    def add_to_totals(self, values: Mapping[str, float]) -> None:
        """Add a finished step, by its metrics and seconds."""
        self.tokens_generated += int(values["rollout/tokens_generated"])
        self.seconds += values["time/step"]

    def base_params(self, model: ModelConfig) -> Params | None:
        """Return the weights that adapters modify; None: all weights are trained."""
        return self.reference.params if model.lora else None

    def policy_weights(self, model: ModelConfig) -> Params:
        """Return the policy's current weights."""
        return adapted(model, self.policy_state.policy.params, self.base_params(model))

    def rollout_weights(self, run: Run, draft_head: bool = True) -> Params:
        """Return a copy of the current weights on the mesh of rollouts.

        draft_head: include its weights, if the run trains one; evaluations have no drafts.
        """
        policy = self.policy_weights(run.model)
        weights = rollout_weights(run.model, policy)
        head = self.policy_state.draft_head
        if head and draft_head:
            vocab = run.update_spec.draft_head.vocab
            copy = copy_draft_head(run.model, head.params, policy, head.counts, vocab=vocab)
            weights |= {"draft_head": copy}
        return move(weights, run.rollout_mesh)

    def arrays(self) -> dict[str, Any]:
        """Return the device's part of a checkpoint."""
        trained = {"train": self.policy_state.modules}
        return trained | {name: x.arrays() for name, x in self.parts.items()}

    def host(self) -> dict[str, Any]:
        """Return the host's part of a checkpoint, JSON-able."""
        own = {"step": self.step, "skipped_in_row": self.skipped_in_row, "machine": machine()}
        own |= {"tokens_generated": self.tokens_generated, "seconds": self.seconds}
        own |= {"rates": self.rates}
        return own | {name: x.host() for name, x in self.parts.items()}

    def restore(self, host: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore a checkpoint; a part that it lacks is left as it is."""
        self.step = host["step"]
        self.policy_state = PolicyState(arrays["train"])
        self.skipped_in_row = host["skipped_in_row"]
        self.tokens_generated = host.get("tokens_generated", 0)
        self.seconds = host.get("seconds", 0.0)
        self.rates = host.get("rates")
        for name, part in self.parts.items():
            if name in host:
                owner = self if name in vars(self) else self.rollout
                setattr(owner, name, part.restore(host[name], arrays.get(name, {})))
        self.rollout.step = self.step + self.batches.ahead
