"""State that every step changes: parts that save, restore and describe themselves.

A new part is a `types.StatePart`, a field of `RunState` and a line of `_new_state`. What a way to
collect keeps between steps is added by `collect`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.update_spec import DraftHeadState, PolicyState, init_policy_state
from specrl_jax.checkpoint import Checkpointer, checksum
from specrl_jax.data.curriculum import PromptStream, make_stream
from specrl_jax.data.prompts import digest
from specrl_jax.group_buffer import GroupBuffer
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params, abstract_trained, rollout_weights
from specrl_jax.rollout.carry_over import Resumed, RunAhead
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES
from specrl_jax.rollout.drafts.store import DraftStore, StoreShape
from specrl_jax.rollout.engine.spec import RolloutSpec, noise_visits
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.kept_noise import KeptNoise
from specrl_jax.run import Run
from specrl_jax.runtime import machine
from specrl_jax.types import StatePart
from specrl_jax.warmup import warm_up


@dataclasses.dataclass(frozen=True)
class Reference(StatePart):
    """The policy before step 1: the KL penalty is measured from it, and adapters belong to it."""

    params: Params  # float32; where adapters are trained, as `lora.freeze` gives them
    saved: bool  # trained by a warm-up here; others are read from their source again
    adapters: Params | None = None  # where the warm-up trained adapters of `params`

    def policy(self, model: ModelConfig) -> Params:
        return self.params if self.adapters is None else adapted(model, self.adapters, self.params)

    def arrays(self) -> Params:
        if self.adapters is not None:
            return {"adapters": self.adapters}
        # The compute type is a machine's own; a checkpoint goes on elsewhere.
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
class Origin(StatePart):
    """Model and held-out prompts that the run began with; a resume with others is refused."""

    source: str  # of the config
    shape: dict[str, Any]  # without what a machine chooses
    weights: int  # their checksum, before a warm-up
    held_out: str  # digest of the held-out prompts' ids and tokens; "": there are none
    solutions: str  # of the solutions' tokens, likewise
    is_reference: bool  # whether the reference is made from the source again

    @classmethod
    def of(cls, run: Run, params: Params, is_reference: bool) -> "Origin":
        """Describe the model of `params`, those that `build` gave."""
        shape = dataclasses.asdict(run.model)
        for name in ("dtype", "remat", "kernels", "unused_ids", "lora"):
            del shape[name]
        batches = run.held_out
        kept = [x[:real] for prompts, real in batches for x in (prompts.ids, prompts.tokens)]
        held_out = digest(*kept[::2], *kept[1::2]) if kept else ""
        source = run.config.model.source
        solutions = digest(*run.solutions.values()) if run.solutions else ""
        return cls(source, shape, checksum(params), held_out, solutions, is_reference)

    def host(self) -> dict[str, Any]:
        digests = {"held_out": self.held_out, "solutions": self.solutions}
        return {"shape": self.shape, "weights": self.weights} | digests

    def restore(self, host: dict[str, Any], arrays) -> "Origin":
        changed = [
            f"{name} was {host['shape'][name]}, now {value}"
            for name, value in self.shape.items()
            if host["shape"].get(name, value) != value
        ]
        if self.is_reference and host["weights"] != self.weights:
            changed.append("its weights, which the run still needs, have changed")
        if changed:
            raise ValueError(
                f"model.source must be the model that the run began with, got {self.source!r}: "
                f"{'; '.join(changed)}; put its files back, or begin a new run"
            )
        for name, now, what in (
            ("held_out", self.held_out, "held-out prompts"),
            ("solutions", self.solutions, "solutions"),
        ):
            before = host.get(name, "")
            if now and before and before != now:
                raise ValueError(
                    f"data must be as in the checkpoint: the {what} were {before}, are {now}; set "
                    "back the data, the tokenizer or the chat template"
                )
        return dataclasses.replace(self, **host)


@dataclasses.dataclass
class RunState:
    """Content of a checkpoint: finished steps, weights with optimizer, and parts; None is off."""

    train: PolicyState
    stream: PromptStream
    store: DraftStore
    origin: Origin
    kept_noise: KeptNoise
    step: int = 0  # finished steps; within a step, its number
    skipped: int = 0  # updates that were skipped, see updates.skip_nonfinite
    skipped_in_row: int = 0  # those since the last that was made
    reference: Reference | None = None  # with a KL penalty, and with adapters
    speculation: Speculation | None = None  # where rollouts choose by measured cost
    run_ahead: RunAhead | None = None  # begun for the next step
    resumed: Resumed | None = None  # unfinished groups of partial rollouts
    groups: GroupBuffer | None = None  # with dynamic sampling or screening

    @property
    def parts(self) -> dict[str, StatePart]:
        """The parts that are on, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: part for name, part in fields.items() if isinstance(part, StatePart)}

    def frozen(self, model: ModelConfig) -> Params | None:
        """Return the weights that adapters are trained for; None: all weights are trained."""
        return self.reference.params if model.lora else None

    def policy(self, model: ModelConfig) -> Params:
        """Return the policy's weights as they are now."""
        return adapted(model, self.train.params, self.frozen(model))

    def rollout_weights(self, run: Run) -> Params:
        """Return the weights of the next rollout, those of the draft head included."""
        policy = self.policy(run.model)
        weights = rollout_weights(run.model, policy)
        head = self.train.draft_head
        if head is None:
            return weights
        vocab = run.update_spec.draft_head.vocab
        copied = copy_draft_head(run.model, head.params, policy, head.counts, vocab=vocab)
        return weights | {"draft_head": copied}

    @property
    def epoch(self) -> int:
        """The pass over the prompts that the next step begins in, from 1."""
        return self.prompts_seen // self.stream.prompts_per_epoch + 1

    @property
    def prompts_seen(self) -> int:
        """Prompts whose rollout is complete, with repeats."""
        return self.stream.given - (len(self.resumed.prompt_ids) if self.resumed else 0)

    def arrays(self) -> dict[str, Any]:
        """The device's part of a checkpoint."""
        return {"train": self.train} | {name: x.arrays() for name, x in self.parts.items()}

    def host(self) -> dict[str, Any]:
        """The host's part of a checkpoint, JSON-able."""
        skipped = (self.skipped, self.skipped_in_row)
        own = {"step": self.step, "skipped": skipped, "machine": machine()}
        return own | {name: x.host() for name, x in self.parts.items()}

    def restore(self, host: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Take over a checkpoint; a part that it does not have stays as it is."""
        self.step = host["step"]
        self.train = arrays["train"]
        self.skipped, self.skipped_in_row = host["skipped"]
        for name, part in self.parts.items():
            if name in host:
                setattr(self, name, part.restore(host[name], arrays.get(name, {})))


def init_state(run: Run, params: Params) -> RunState:
    """The state before step 1: the policy warmed up, nothing stored."""
    origin = Origin.of(run, params, is_reference=False)
    trained, reference, draft_head = _begin(run, params)
    frozen = reference.params if run.model.lora else None
    train = init_policy_state(run.update_spec, trained, frozen, draft_head)
    return _new_state(run, train, origin, reference)


def _begin(run: Run, params: Params) -> tuple[Params, Reference | None, DraftHeadState | None]:
    """Return what is trained before step 1, the reference where there is one, and the draft head
    where a warm-up has trained one.

    params: those that `build` gave; they may be donated. A warm-up trains what is trained later,
    but all weights of a policy from nothing: there is nothing yet to adapt.
    """
    config = run.config
    model = run.model
    warm = config.warmup.steps > 0
    inputs = (run.scorer.tokenizer, run.dataset)
    adapts = model.lora and config.model.source
    draft_head = None
    if warm and not adapts:
        update_spec = dataclasses.replace(run.update_spec, model=model.replace(lora=None))
        params, draft_head = warm_up(config, update_spec, params, *inputs)
    if model.lora is None:
        penalized = config.algorithm.kl_coef > 0
        copied = jax.tree.map(jnp.copy, params) if penalized else None
        return params, Reference(copied, saved=warm) if penalized else None, draft_head
    frozen = lora.freeze(model, params)
    adapters = lora.init_adapters(model, run.key)
    if not (warm and adapts):
        return adapters, Reference(frozen, saved=warm), draft_head
    adapters, draft_head = warm_up(config, run.update_spec, adapters, *inputs, frozen)
    return adapters, Reference(frozen, False, jax.tree.map(jnp.copy, adapters)), draft_head


def _unread_reference(run: Run, params: Params) -> Reference | None:
    """Return the reference of a run that is resumed, without what its checkpoint holds."""
    config = run.config
    model = run.model
    warm = config.warmup.steps > 0
    if model.lora is None:
        return Reference(params, saved=warm) if config.algorithm.kl_coef else None
    frozen = lora.freeze(model, params)
    if warm and config.model.source:
        return Reference(frozen, False, lora.abstract_adapters(model))
    return Reference(frozen, saved=warm)


def resume(
    run: Run, params: Params, checkpoints: Checkpointer, step: int | None = None
) -> RunState:
    """The state that a checkpoint holds, bit for bit; step: None for the newest that is intact.

    params: those that `build` gave. A step may be of a run with another `algorithm.kl_coef`. A
    reference that it has and this run does not need is left out; one that it lacks is made again.
    """
    reference = _unread_reference(run, params)
    saved = step is None or checkpoints.holds(step, "reference")
    is_reference = reference is not None and not (saved and reference.saved)
    origin = Origin.of(run, params, is_reference)
    frozen = reference.params if run.model.lora else None
    init = functools.partial(init_policy_state, run.update_spec)
    train = jax.eval_shape(init, abstract_trained(run.model), frozen)
    state = _new_state(run, train, origin, reference)
    like = state.arrays()
    if step is None:
        step, arrays, host = checkpoints.restore_newest(like)
    else:
        if not saved:
            like.pop("reference", None)
        arrays, host = checkpoints.restore(step, like, partial=True)
    state.restore(host, arrays)
    if reference is not None and not saved and run.config.warmup.steps:
        print("the checkpoint has no reference of the KL penalty: it is made again", flush=True)
        _, state.reference, _ = _begin(run, params)
    if state.speculation is not None and host["machine"] != machine():
        print(f"rollout: now on {machine()}, was on {host['machine']}")
        state.speculation.seconds = None  # it is measured again
    print(f"resumed at step {step} of {run.total_steps}", flush=True)
    return state


def _new_state(
    run: Run, train: PolicyState, origin: Origin, reference: Reference | None
) -> RunState:
    """Every part that the configuration asks for, empty."""
    config = run.config
    settings = run.config.rollout
    state = RunState(
        train=train,
        stream=make_stream(config, run.prompts, run.total_steps),
        store=_draft_store(run),
        origin=origin,
        reference=reference,
        kept_noise=KeptNoise(
            noise_visits(config),
            settings.noise_refresh,
            run.rollout_spec.group_size,
            needs_signal=not has_critic(config.critic.kind),
        ),
    )
    if settings.adaptive and (DRAFT_SOURCES[settings.draft].drafts or settings.run_ahead):
        state.speculation = Speculation(verifies_all=noise_visits(config) > 1)
    run.collector.add_part(run, state)
    return state


def _draft_store(run: Run) -> DraftStore:
    model = run.model
    sizes = f"{model.num_layers} x {model.embed_dim}, {model.vocab_size} tokens"
    policy = f"{run.config.model.source or 'from nothing'} ({model.family}, {sizes})"
    shape = store_shape(run.config, run.rollout_spec, len(run.prompts.lens))
    return DraftStore(
        shape,
        max_age=run.config.rollout.store_age,
        owner={"tokenizer": run.scorer.tokenizer.fingerprint, "model": policy},
    )


def store_shape(config, spec: RolloutSpec, prompts: int) -> StoreShape:
    """Return the draft store's shape for `prompts` training prompts."""
    settings = config.rollout
    parts = settings.group_size // spec.group_size
    return StoreShape(
        prompts=(settings.store_prompts or prompts) * parts,
        samples=spec.group_size,
        response_slots=settings.response_len,
        generations=settings.draft_age,
        history=spec.program.draft_history,
        logprobs=not spec.program.accept.samples_anew,
        k=spec.program.stored_logprobs,
    )
