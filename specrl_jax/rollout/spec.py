"""`RolloutSpec`: everything that is fixed in the compiled programs of rollouts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config.fields import filled
from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, MATCH, AcceptanceRule
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftSource
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.rollout.stop_strings import NOTHING, StopStrings, turn_ends
from specrl_jax.sharding import shards
from specrl_jax.types import Rollout


def acceptance_rule(config) -> AcceptanceRule:
    """Return the rule of a config; MATCH if no previous response is verified."""
    previous = DRAFT_SOURCES[config.rollout.draft].verifies_previous
    return (
        ACCEPTANCE_RULES[config.rollout.accept].of(config.rollout.lenience) if previous else MATCH
    )


def noise_visits(config) -> int:
    """Return for how many visits samples reuse their noise.

    It is 1 (fresh noise at every visit) unless the rule samples every token anew. Other rules draw
    a new token after a rejection, which must not share its noise with the draft.
    """
    return config.rollout.noise_epochs if acceptance_rule(config).samples_every_token else 1


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """Settings that stay the same from rollout to rollout.

    A pytree whose only leaves are the rule's numbers; everything else is fixed in the programs.
    """

    model: ModelConfig
    sampling: SamplingConfig
    accept: AcceptanceRule  # of drafts to verify
    eos_ids: tuple[int, ...]  # each one ends a turn
    pad_id: int
    prompt_slots: int  # P
    response_slots: int  # R
    group_size: int = 1  # G, responses per prompt
    draft_source: DraftSource | None = None  # proposes tokens in the decode steps
    # Sampling of the learned head, which drafts when the source has no token; None: no head.
    draft_head: SamplingConfig | None = None
    stored_logprobs: int = 0  # k likeliest tokens whose log-probs are kept at every position
    keeps_accepted: bool = False  # rollouts have `Tokens.accepted_probs`
    keeps_routing: bool = False  # rollouts have `Tokens.routing`
    max_width: int = 1  # most tokens fed per decode step; > 1 with a draft source or head
    row_buckets: int = 4  # number of batch sizes, each half the previous
    max_rows: int = 0  # most rows computed at a time; 0: all
    stop: StopStrings | None = None  # texts that end a turn too
    turns: bool = False  # whether rows continue after their environment has replied

    @property
    def columns(self) -> int:
        """Response columns of a row, then a margin that finished rows write into."""
        return self.response_slots + self.max_width

    @property
    def draft_history(self) -> int:
        """Generations of stored responses that the draft source needs."""
        return self.draft_source.history if self.draft_source else 0

    @classmethod
    def from_config(
        cls,
        config,
        model: ModelConfig,
        *,
        eos_ids: tuple[int, ...],
        pad_id: int,
        stop: StopStrings | None = None,
    ) -> "RolloutSpec":
        """Return the training rollout of a config."""
        settings = config.rollout
        drafts = DRAFT_SOURCES[settings.draft]
        rule = acceptance_rule(config)
        sampling = filled(SamplingConfig, settings)
        stored = settings.stored_logprobs if rule.needs_distribution else 0
        if config.algorithm.keep_sampling_mask:
            stored = max(stored, settings.top_k)
        return filled(
            cls,
            settings,
            model=model,
            sampling=sampling,
            accept=rule,
            eos_ids=eos_ids,
            pad_id=pad_id,
            prompt_slots=config.data.prompt_len,
            response_slots=settings.response_len,
            draft_source=drafts.make_source(settings) if drafts.make_source else None,
            draft_head=sampling if drafts.head else None,
            stored_logprobs=stored,
            keeps_routing=config.updates.replay_routing,
            max_width=settings.max_width if drafts.proposes else 1,
            stop=stop,
            turns=bool(config.environment.name),
        )

    def for_evaluation(self, samples: int, temperature: float) -> "RolloutSpec":
        """Return the rollout spec of `samples` responses per prompt, without drafts.

        Top-k and top-p are those of training.
        """
        return dataclasses.replace(
            self,
            sampling=self.sampling.at(temperature),
            accept=MATCH,
            group_size=samples,
            draft_source=None,
            draft_head=None,
            stored_logprobs=0,
            keeps_accepted=False,
            keeps_routing=False,
            max_width=1,
            row_buckets=min(self.row_buckets, 2),  # evaluation is rare: few programs are enough
        )

    def empty_rollout(self, rows: int) -> Rollout:
        """Return a rollout's rows without tokens."""
        return Rollout.empty(
            rows,
            self.response_slots,
            self.stored_logprobs,
            accepted=self.keeps_accepted,
            routing=self.routing,
        )

    @property
    def routing(self) -> jax.ShapeDtypeStruct | None:
        """Return the shape of a token's `Tokens.routing`; None: it is not kept."""
        return self.model.routing if self.keeps_routing else None

    @property
    def stop_window(self) -> int:
        """Number of preceding tokens needed to decide whether a token ends a turn."""
        return self.stop.window if self.stop else 0

    def turn_ends(self, tokens: Any, xp: Any = jnp) -> Any:
        """Mark the tokens that end a turn, bool [B, T].

        tokens: int32 [B, stop_window + T]; NOTHING for tokens outside the turn. xp:
        jax.numpy, or numpy on the host.
        """
        return turn_ends(self.eos_ids, self.stop, tokens, xp)

    def ended(
        self, tokens: np.ndarray, lens: np.ndarray, turn_starts: np.ndarray | None = None
    ) -> np.ndarray:
        """Mark the responses that end with a stop token or text, bool [B]; others were cut off.

        tokens: int32 [B, R]; lens: int32 [B]; turn_starts: int32 [B], tokens before each row's last
        turn; None: they have one turn.
        """
        first = np.zeros_like(lens) if turn_starts is None else turn_starts
        positions = lens[:, None] - 1 + np.arange(-self.stop_window, 1)
        last = np.take_along_axis(tokens, np.maximum(positions, 0), axis=1)
        return self.turn_ends(np.where(positions < first[:, None], NOTHING, last), np)[:, 0]

    def check_max_rows(self) -> None:
        """Raise ValueError if `max_rows` is less than one row per shard of the batch."""
        if 0 < self.max_rows < shards("batch"):
            raise ValueError(
                f"rollout.max_rows must be 0 or >= mesh.data x mesh.fsdp = {shards('batch')}, got "
                f"{self.max_rows}; raise it"
            )

    def buckets(self, rows: int) -> Buckets:
        """Return the program shapes of a rollout of `rows` rows on the mesh in use.

        Raises ValueError as `check_max_rows` does.
        """
        self.check_max_rows()
        pieces = shards("batch")
        most = self.max_rows // pieces * pieces
        return Buckets(
            self.model,
            min(rows, most or rows),
            self.prompt_slots,
            self.response_slots,
            self.row_buckets,
            shards=pieces,
            max_width=self.max_width,
            turns=self.turns,
        )


jax.tree_util.register_dataclass(
    RolloutSpec,
    data_fields=["accept"],
    meta_fields=[x.name for x in dataclasses.fields(RolloutSpec) if x.name != "accept"],
)
