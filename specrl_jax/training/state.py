"""Parts of a run that never change (`Run`), and those that every step changes (`RunState`).

A new part of the state is a `types.StatePart`, which gives and takes back what a checkpoint holds,
a field of `RolloutState` or `RunState`, and a line of `build._new_rollout_state` or
`build._new_state`. A collector is a part of its own (`collect`).
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax import __version__, hosts
from specrl_jax.algorithms.update_spec import PolicyState, UpdateSpec
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.data.prompts import Dataset, EncodedDataset, digest
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params, rollout_weights
from specrl_jax.process.checkpoint import checksum
from specrl_jax.process.runtime import machine
from specrl_jax.responses import Responder, Responses
from specrl_jax.rollout.drafts.store import DraftStore
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.kept_noise import KeptNoise
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import move
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.training.batch import TrainBatch
from specrl_jax.types import Batch, Drafts, Prompts, Rollout, StatePart


class Frozen(NamedTuple):
    """Weights beside the policy's that are not trained; a resumed run reads them again."""

    model: ModelConfig
    params: Params  # as `lora.freeze` gives them
    digest: str  # of the weights as they were read


@dataclasses.dataclass(frozen=True)
class Run:
    """Parts of a run that `config` builds on the mesh in use."""

    config: Any
    dataset: Dataset
    prompts: EncodedDataset
    held_out: list[tuple[Prompts, int]]  # batches, and how many of their prompts are no padding
    stages: "tuple[Stage, ...]"  # between a step's rollouts and its updates
    model: ModelConfig
    rollout_spec: RolloutSpec
    eval_spec: RolloutSpec
    responder: Responder
    roll_out: Callable[..., RolloutResult]  # in training; `Responder.roll_out`, or a recipe's
    update_spec: UpdateSpec
    schedule: optax.Schedule
    collector_type: type  # makes the state's collector
    total_steps: int
    key: jax.Array
    source_type: type  # makes the state's source of batches
    rollout_mesh: jax.sharding.Mesh  # of rollouts and evaluation; the mesh in use is of updates
    frozen: Frozen | None = None  # for terms of the loss

    @property
    def trained_group_size(self) -> int:
        return self.collector_type.trained_group_size(self.config)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints, by name, of what all processes of a run must have read alike."""
        read = [self.prompts, *(prompts for prompts, _ in self.held_out)]
        by_stages = {f"the {name}": x for name, x in stage_digests(self.stages).items()}
        return by_stages | {
            "specrl_jax": __version__,
            "data.source": digest(*(prompts.ids for prompts in read)),
            "tokenizer.source": self.responder.tokenizer.fingerprint,
            "the prompts' tokens": digest(*(prompts.tokens for prompts in read)),
            "model.source": repr(self.model),
        }


def stage_digests(stages: "Sequence[Stage]") -> dict[str, str]:
    """Return digests, by name, of all data that stages have read."""
    return {name: value for stage in stages for name, value in stage.digests.items()}


@dataclasses.dataclass(frozen=True)
class Reference(StatePart):
    """Policy before step 1: the KL penalty is measured from it, and adapters belong to it."""

    params: Params  # float32; where adapters are trained, as `lora.freeze` gives them
    saved: bool  # a warm-up trained it, so checkpoints hold it; else its source is read again
    adapters: Params | None = None  # where the warm-up trained adapters of `params`

    def policy(self, model: ModelConfig) -> Params:
        return self.params if self.adapters is None else adapted(model, self.adapters, self.params)

    def arrays(self) -> Params:
        if self.adapters is not None:
            return {"adapters": self.adapters}
        # In float32, as the machine that resumes may compute in another type.
        return jax.tree.map(lambda x: x.astype(jnp.float32), self.params) if self.saved else {}

    def host(self) -> dict[str, Any]:
        return {"dtype": self.params["embed"].dtype.name}

    def restore(self, host, arrays: Params) -> "Reference":
        if self.adapters is not None:
            return dataclasses.replace(self, **arrays)
        if not self.saved:
            return self
        params = jax.tree.map(lambda x, own: x.astype(own.dtype), arrays, self.params)
        return dataclasses.replace(self, params=params)


@dataclasses.dataclass(frozen=True)
class RunOrigin(StatePart):
    """Model and data that a run began with; a resume refuses others."""

    source: str  # of the config
    shape: dict[str, Any]  # without what a machine chooses
    weights: int  # their checksum, before a warm-up
    data: dict[str, str]  # digests by name: of held-out prompts, and of what stages have read
    is_reference: bool  # the reference is made from the source again

    @classmethod
    def of(cls, run: Run, params: Params, is_reference: bool) -> "RunOrigin":
        """Describe the model of `params`, those that `build` gave."""
        shape = json.loads(json.dumps(dataclasses.asdict(run.model), default=str))
        for name in ("dtype", "remat", "kernels", "unused_ids", "lora"):
            del shape[name]
        ids = [prompts.ids[:real] for prompts, real in run.held_out]
        tokens = [prompts.tokens[:real] for prompts, real in run.held_out]
        held_out = {"held-out prompts": digest(*ids, *tokens)} if ids else {}
        frozen = {"weights that are not trained": run.frozen.digest} if run.frozen else {}
        return cls(
            source=run.config.model.source,
            shape=shape,
            weights=checksum(params),
            data=stage_digests(run.stages) | held_out | frozen,
            is_reference=is_reference,
        )

    def host(self) -> dict[str, Any]:
        return {"shape": self.shape, "weights": self.weights, "data": self.data}

    def restore(self, host: dict[str, Any], arrays) -> "RunOrigin":
        changed = [
            f"{name} was {host['shape'][name]}, now {value}"
            for name, value in self.shape.items()
            if host["shape"][name] != value
        ]
        if self.is_reference and host["weights"] != self.weights:
            changed.append("its weights, which the run still needs, have changed")
        if changed:
            raise ValueError(
                f"model.source must be the model that the run began with, got {self.source!r}: "
                f"{'; '.join(changed)}; put its files back, or begin a new run"
            )
        for what, now in self.data.items():
            before = host["data"].get(what, now)
            if before != now:
                raise ValueError(
                    f"data must be as in the checkpoint: the {what} were {before}, are {now}; set "
                    "back the data, the tokenizer or the chat template"
                )
        return dataclasses.replace(self, **host | {"data": self.data | host["data"]})


@dataclasses.dataclass
class RolloutState:
    """Parts of the state that rollouts change, on the mesh of rollouts; None: the part is off.

    Where rollouts have a thread of their own, that thread alone touches these parts, and the main
    thread alone touches the rest of `RunState`. The main thread saves all parts between two steps
    of the loop, when no rollout is under way.
    """

    key: jax.Array  # of the run
    stream: PromptStream
    store: DraftStore
    kept_noise: KeptNoise
    step: int = 0  # steps whose rollouts are done; within a step's rollouts, its number
    epoch: int = 0  # pass over the prompts, from 1, of the first prompt of `step`
    speculation: Speculation | None = None  # where rollouts choose by measured cost
    collector: Any = None  # `collect.Collector`, or a recipe's

    def begin_step(self) -> None:
        """Begin the rollouts of the next step."""
        self.step += 1
        self.epoch = self.prompts_seen // self.stream.prompts_per_epoch + 1
        self.stream.begin(self.step)

    def noise_key(self, prompts: Prompts) -> NoiseKey:
        """Return the noise of a rollout of `prompts` in this step."""
        noise_steps = self.kept_noise.noise_steps(prompts, self.step)
        return NoiseKey(self.key, self.step, noise_steps=noise_steps)

    def observe(self, responses: Responses, requests: Requests, previous: Drafts) -> Responses:
        """Take in a rollout's responses; return them with the last responses and noise marks.

        The responses are the next drafts of their prompts. Their rewards choose the next prompts
        and the samples that keep their noise.

        previous: the last responses of all rows that were requested.
        """
        rewards = responses.group_rewards
        self.store.put(responses.prompts, responses.rollout, step=self.step)
        self.collector.observe(self, responses)
        noise_steps = requests.noise.noise_steps[responses.groups]
        kept = self.kept_noise.observe(responses.prompts, noise_steps, rewards)
        tokens, lens = hosts.fetch((previous.tokens.ids, previous.lens))
        rows = responses.row_ids
        return dataclasses.replace(
            responses, previous=(tokens[rows], lens[rows]), on_kept_noise=kept.reshape(-1)
        )

    @property
    def prompts_seen(self) -> int:
        """Prompts whose rollout is complete, with repeats."""
        return self.stream.given - self.collector.prompts_waiting


@dataclasses.dataclass
class RunState:
    """Content of a checkpoint: finished steps, weights with optimizer, parts; None: it is off."""

    policy_state: PolicyState
    rollout: RolloutState
    source: Any  # `source.BatchSource`, or a recipe's
    origin: RunOrigin
    step: int = 0  # finished steps; within a step, its number
    skipped_in_row: int = 0  # updates since the last that was made, see updates.skip_nonfinite
    tokens_generated: int = 0  # of all finished steps
    seconds: float = 0.0  # of all finished steps, without evaluations and checkpoints
    # The policy's learning rates: the last update's and, by the schedule, the next one's.
    rates: tuple[float, float] | None = None
    reference: Reference | None = None  # with a KL penalty, and with adapters

    @property
    def parts(self) -> dict[str, StatePart]:
        """Parts that are on, by name."""
        named = vars(self.rollout) | vars(self)
        return {name: part for name, part in named.items() if isinstance(part, StatePart)}

    @property
    def updates(self) -> int:
        """Updates of the policy that were made."""
        (_, count), *_ = optax.tree.get_all_with_path(self.policy_state.policy.opt_state, "count")
        return int(hosts.fetch(count))

    def add_to_totals(self, values: Mapping[str, float]) -> None:
        """Add a finished step, by its metrics and seconds."""
        self.tokens_generated += int(values["rollout/tokens_generated"])
        self.seconds += values["time/step"]

    def base_params(self, model: ModelConfig) -> Params | None:
        """Return the weights that adapters are trained for; None: all weights are trained."""
        return self.reference.params if model.lora else None

    def policy(self, model: ModelConfig) -> Params:
        """Return the policy's weights as they are now."""
        return adapted(model, self.policy_state.policy.params, self.base_params(model))

    def rollout_weights(self, run: Run) -> Params:
        """Return a copy of the current weights, with the draft head's, on the mesh of rollouts."""
        policy = self.policy(run.model)
        weights = rollout_weights(run.model, policy)
        if head := self.policy_state.draft_head:
            vocab = run.update_spec.draft_head.vocab
            draft_head = copy_draft_head(run.model, head.params, policy, head.counts, vocab=vocab)
            weights |= {"draft_head": draft_head}
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
        """Take over a checkpoint; a part that it does not have stays as it is."""
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
        self.rollout.step = self.step + self.source.ahead


# The batch, the ids of the rows that the updates take in order, int [B] (None: as they were), and
# metrics.
Staged = tuple[Batch, np.ndarray | None, dict[str, float]]


class Stage:
    """A stage, made once for a run. A recipe takes the slot `STAGE` by a subclass."""

    # A recipe's stage comes after the log-probs of `Logprobs`; else before, so that none are
    # computed of what it leaves out.
    after_logprobs = False

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the field of the configuration that asks for the stage; "" where none does."""
        raise NotImplementedError

    @staticmethod
    def loss_count(config: Any) -> int:
        """Return what the policy's loss is divided by; 0: the count of its aggregation."""
        return 0

    @staticmethod
    def shapes(config: Any, rollout: Rollout, batch: Batch) -> Batch:
        """Return the shapes of the batch after the stage; rollout, batch: shapes before it."""
        return batch

    def __init__(self, config: Any, prompts: EncodedDataset, tokenizer: Tokenizer):
        """Make the stage; read what it needs beside rollouts."""

    @property
    def digests(self) -> dict[str, str]:
        """Return digests, by name, of the data that it has read; a resume refuses others."""
        return {}

    def __call__(self, run: Run, state: RunState, batch: Batch, collected: TrainBatch) -> Staged:
        raise NotImplementedError
