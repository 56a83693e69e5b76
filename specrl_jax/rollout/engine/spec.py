"""Setup that stays the same from rollout to rollout: programs and bounds."""

import dataclasses

from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, MATCH, AcceptanceRule
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftSource
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import shards


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """Settings that a rollout's programs are compiled for; hashable."""

    model: ModelConfig
    sampling: SamplingConfig
    accept: AcceptanceRule  # of drafts to verify
    eos_ids: tuple[int, ...]
    pad_id: int
    response_slots: int  # R
    logits_chunk: int  # tokens whose logits are computed at once
    group_size: int = 1  # G, responses per prompt
    draft_source: DraftSource | None = None  # proposes tokens in the decode steps
    stored_logprobs: int = 0  # k likeliest tokens whose log-probs are kept at every position
    margin: int = 1  # columns after the response slots, at least the widest step

    @property
    def columns(self) -> int:
        return self.response_slots + self.margin

    @property
    def draft_history(self) -> int:
        """Generations of stored responses that the draft source wants."""
        return self.draft_source.history if self.draft_source else 0


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """Everything that stays the same from rollout to rollout."""

    program: ProgramSpec
    prompt_slots: int  # P
    group_size: int  # G
    row_buckets: int = 4  # batch sizes, each half the last
    cache_lengths: int = 2  # cache lengths, each half the next
    max_rows: int = 0  # rows computed at once, in whole groups on every shard; 0: all
    max_width: int = 1  # most tokens that a decode step feeds; > 1 with a draft source
    verify_width: int = 0  # draft tokens verified in one pass, 0: all
    refresh: float = 0.0  # share of the drafts that are left out

    @classmethod
    def from_config(
        cls, config, model: ModelConfig, *, eos_ids: tuple[int, ...], pad_id: int
    ) -> "RolloutSpec":
        """The training rollout of a config."""
        settings = config.rollout
        drafts = DRAFT_SOURCES[config.rollout.draft]
        rule = ACCEPTANCE_RULES[settings.accept] if drafts.previous else MATCH
        program = ProgramSpec(
            model=model,
            sampling=SamplingConfig(settings.temperature, settings.top_k, settings.top_p),
            accept=rule,
            eos_ids=eos_ids,
            pad_id=pad_id,
            response_slots=settings.response_len,
            logits_chunk=settings.logits_chunk,
            draft_source=drafts.source(settings) if drafts.source else None,
            stored_logprobs=settings.stored_logprobs if rule.needs_distribution else 0,
        )
        return cls(
            program=program,
            prompt_slots=config.data.prompt_len,
            group_size=settings.group_size,
            row_buckets=settings.row_buckets,
            cache_lengths=settings.cache_lengths,
            max_rows=settings.max_rows,
            max_width=settings.max_width if drafts.source else 1,
            verify_width=settings.verify_width,
            refresh=settings.draft_refresh,
        )

    def for_evaluation(self, samples: int, temperature: float) -> "RolloutSpec":
        """The same rollout without drafts, `samples` responses a prompt, without truncation."""
        program = dataclasses.replace(
            self.program,
            sampling=SamplingConfig(temperature),
            accept=MATCH,
            draft_source=None,
            stored_logprobs=0,
        )
        return dataclasses.replace(self, program=program, group_size=samples, max_width=1)

    def check_max_rows(self) -> None:
        """Raise ValueError where `max_rows` holds less than a group on every shard of the batch."""
        if 0 < self.max_rows < shards("batch") * self.group_size:
            raise ValueError(
                f"rollout.max_rows={self.max_rows} must hold at least {shards('batch')} groups of "
                f"{self.group_size} rows, got room for {self.max_rows // self.group_size}; raise it"
            )

    def buckets(self, rows: int) -> Buckets:
        """The program shapes of a rollout of `rows` rows on the mesh in use.

        Raises ValueError as `check_max_rows` does.
        """
        self.check_max_rows()
        whole_groups = shards("batch") * self.group_size
        most = self.max_rows // whole_groups * whole_groups
        # A rule that decides at the draft's end sees all of it in one pass.
        return Buckets(
            min(rows, most or rows),
            self.prompt_slots,
            self.program.response_slots,
            self.row_buckets,
            self.cache_lengths,
            multiple=shards("batch"),
            group_size=self.group_size,
            max_width=self.max_width,
            verify_width=0 if self.program.accept.needs_distribution else self.verify_width,
        )

    def program_for(self, buckets: Buckets) -> ProgramSpec:
        """The program with what follows from the rollout's spec."""
        margin = max(self.max_width, buckets.verify[-1])
        return dataclasses.replace(self.program, group_size=self.group_size, margin=margin)
