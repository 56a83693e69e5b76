"""What stays the same from rollout to rollout: the setup of its programs and its bounds."""

import dataclasses

from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import shards


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """What a rollout's programs are compiled for; hashable.

    group_size: responses per prompt. tree: None without tree drafts. stored: likeliest tokens
    whose log-probs are kept of every law. margin: columns behind the response slots, at least the
    widest step.
    """

    model: ModelConfig
    law: SamplingConfig
    accept: str
    eos_ids: tuple[int, ...]
    pad_id: int
    response_slots: int
    logits_chunk: int
    group_size: int = 1
    tree: SuffixDraftConfig | None = None
    stored: int = 0
    margin: int = 1

    @property
    def columns(self) -> int:
        return self.response_slots + self.margin


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """Everything that stays the same from rollout to rollout.

    row_rungs, windows: sizes of the ladder. max_rows: rows in flight at once (0: all). max_width:
    tokens a decode step checks at most (more than 1 with tree drafts). verify_chunk: draft tokens
    verified in one pass (0: all). cache_bytes: bound of the KV caches (0: none). refresh: share of
    the drafts that are left out. token_age: steps after which a draft is cut (0: never).
    """

    setup: ProgramSpec
    prompt_slots: int
    group_size: int
    row_rungs: int = 4
    windows: int = 2
    max_rows: int = 0
    max_width: int = 1
    verify_chunk: int = 0
    cache_bytes: float = 0.0
    refresh: float = 0.0
    token_age: int = 0

    @classmethod
    def from_config(
        cls, config, model: ModelConfig, *, eos_ids: tuple[int, ...], pad_id: int
    ) -> "Plan":
        """The training rollout that `config.rollout` asks for."""
        settings, tree = config.rollout, config.rollout.tree
        trees = "tree" in settings.draft
        rule = acceptance.RULES[settings.accept]
        setup = ProgramSpec(
            model=model,
            law=SamplingConfig(settings.temperature, settings.top_k, settings.top_p),
            accept=settings.accept if _previous(settings) else "match",
            eos_ids=eos_ids,
            pad_id=pad_id,
            response_slots=settings.response_len,
            logits_chunk=settings.logits_chunk,
            tree=SuffixDraftConfig(tree.depth, tree.factor, tree.offset, tree.min_prob)
            if trees
            else None,
            stored=settings.stored_logprobs if rule.needs_law and _previous(settings) else 0,
        )
        return cls(
            setup=setup,
            prompt_slots=config.data.prompt_len,
            group_size=(
                config.curriculum.screening
                if config.curriculum.name == "speed"
                else settings.group_size
            ),
            row_rungs=settings.row_buckets,
            windows=settings.cache_lengths,
            max_rows=settings.max_rows,
            max_width=settings.max_width if trees else 1,
            verify_chunk=settings.verify_width,
            cache_bytes=settings.max_cache_gib * 2**30,
            refresh=settings.draft_refresh,
            token_age=settings.token_age,
        )

    def for_evaluation(self, samples: int, temperature: float) -> "Plan":
        """The same rollout without drafts, `samples` responses a prompt, an untruncated law."""
        law = SamplingConfig(temperature)
        setup = dataclasses.replace(self.setup, law=law, accept="match", tree=None, stored=0)
        return dataclasses.replace(self, setup=setup, group_size=samples, max_width=1)

    def ladder(self, rows: int) -> Buckets:
        """The program shapes of a rollout of `rows` rows on the mesh in use.

        Raises ValueError where `max_rows` holds less than a group a piece of the batch.
        """
        if 0 < self.max_rows < shards("batch") * self.group_size:
            raise ValueError(
                f"rollout.max_rows={self.max_rows} must hold at least {shards('batch')} groups of "
                f"{self.group_size} rows, got room for {self.max_rows // self.group_size}; raise it"
            )
        # A rule that decides at the draft's end sees all of it in one pass.
        whole = acceptance.RULES[self.setup.accept].whole_draft
        return Buckets.build(
            min(rows, self.max_rows or rows),
            self.prompt_slots,
            self.setup.response_slots,
            self.row_rungs,
            self.windows,
            multiple=shards("batch"),
            group_size=self.group_size,
            max_width=self.max_width,
            verify_chunk=0 if whole else self.verify_chunk,
        )

    def full_setup(self, ladder: Buckets) -> ProgramSpec:
        """The setup with what follows from the plan."""
        margin = max(self.max_width, ladder.verify[-1])
        return dataclasses.replace(self.setup, group_size=self.group_size, margin=margin)


def _previous(settings) -> bool:
    return "previous" in settings.draft
