"""Sources of drafts: `DRAFT_SOURCES`, the choices of `rollout.draft`.

Two kinds, which can be combined:

- *Verified drafts*: the prompts' earlier responses, verified by an acceptance rule (SPEC-RL).
- A *draft source* proposes tokens inside the jitted decode step. A proposed token is accepted if
  the policy samples the same token. So a draft source changes no response: it only saves steps.

To add a draft source, write a class like `SuffixDrafts` and add it to `DRAFT_SOURCES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.config.fields import filled
from specrl_jax.registry import Table
from specrl_jax.rollout.drafts import suffix_match
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig, SuffixIndex
from specrl_jax.rollout.rows import Rows
from specrl_jax.sharding import put
from specrl_jax.types import Prompts

# Stored responses of Q prompts, E generations (newest first) and G samples: tokens int32
# [Q, E, G, R] and lens int32 [Q, E, G], 0 if there is none; the same on every device.
DraftHistory = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class DraftSource:
    """Proposes tokens in the decode step. Hashable: fixed in the compiled programs.

    Its state is a pytree of arrays, made for one rollout. A subclass must define `propose`. A
    source that reads only the rows needs no state. `propose` and `observe` are traced. Timed decode
    steps include their cost.
    """

    # Generations of stored responses that `init` needs.
    history: int = dataclasses.field(default=0, kw_only=True)

    def init(self, prompts: Prompts, history: DraftHistory, group_size: int) -> Any:
        """Return the state before the first step of a rollout of Q * group_size rows.

        Row i is sample i % group_size of prompt i // group_size.
        """
        return ()

    def propose(self, state: Any, rows: Rows, width: int) -> tuple[Array, Array]:
        """Propose draft tokens int32 [b, width] that may come next, and how many are valid, int32
        [b].

        rows: b of the rollout's rows in any order; `rows.row_ids` are their indices. Rows and
        results are split over the batch. A row with an index >= Q * group_size is padding.
        """
        raise NotImplementedError

    def observe(self, state: Any, rows: Rows, tokens: Array, counts: Array) -> Any:
        """Return the state after a step in which rows got the first `counts` of `tokens`.

        rows: as they were before the step. tokens: int32 [b, W]. counts: int32 [b].
        """
        return state

    def sync(self, state: Any, tokens: Array, lens: Array) -> Any:
        """Return the state for all rows as they are now.

        Called before a step if rows have tokens that `observe` did not see. tokens: int32
        [Q * group_size, >= R]. lens: int32 [Q * group_size].
        """
        return state


def abstract_state(
    source: DraftSource, prompts: Prompts, history: tuple[int, int, int, int], group_size: int
) -> Any:
    """Return the shapes of the result of `DraftSource.init`; history: shapes of its tokens."""

    def init(tokens: Array, lens: Array) -> Any:
        return source.init(prompts, (tokens, lens), group_size)

    tokens = abstract.array(np.int32, history, *(None,) * 4)
    lens = abstract.array(np.int32, history[:3], *(None,) * 3)
    return abstract.result(init, tokens, lens)


@dataclasses.dataclass(frozen=True)
class SuffixDrafts(DraftSource):
    """Drafts from the tokens that followed a row's last tokens in other responses to its prompt
    (SRT, arXiv 2601.09083): stored ones, and those that its group is writing."""

    config: SuffixDraftConfig
    decay: float = 1.0  # factor of a response's votes per generation of its age

    @classmethod
    def from_config(cls, settings) -> "SuffixDrafts":
        """Read the settings, `config.rollout`."""
        tree = settings.tree
        return filled(cls, tree, config=filled(SuffixDraftConfig, tree))

    def init(self, prompts: Prompts, history: DraftHistory, group_size: int) -> SuffixIndex:
        tokens, lens = history
        prompts, generations, samples, slots = tokens.shape
        by_age = self.decay ** np.arange(generations)
        weights = put(np.repeat(by_age, samples).astype(np.float32), None)
        return suffix_match.build(
            tokens.reshape(prompts, generations * samples, slots),
            lens.reshape(prompts, generations * samples),
            weights,
            live=group_size,
            depth=self.config.depth,
        )

    def propose(self, state: SuffixIndex, rows: Rows, width: int) -> tuple[Array, Array]:
        return suffix_match.propose(
            state, *_texts(state, rows.row_ids), rows.lens, width, self.config
        )

    def observe(self, state: SuffixIndex, rows: Rows, tokens, counts) -> SuffixIndex:
        texts = _texts(state, rows.row_ids)
        return suffix_match.append(state, *texts, rows.lens, tokens, counts)

    def sync(self, state: SuffixIndex, tokens: Array, lens: Array) -> SuffixIndex:
        return suffix_match.sync(state, tokens, lens)


def _texts(state: SuffixIndex, index: Array) -> tuple[Array, Array]:
    """Return each row's prompt and its own source in the index, int32 [b]; any for padding."""
    prompts, texts = state.tokens.shape[:2]
    index = jnp.minimum(index, prompts * state.live - 1)
    return index // state.live, texts - state.live + index % state.live


@dataclasses.dataclass(frozen=True)
class DraftChoice:
    """Meaning of a choice of `rollout.draft`."""

    # Earlier responses are verified by `rollout.accept`.
    verifies_previous: bool = False
    # Draft source of `config.rollout`.
    make_source: Callable[[Any], DraftSource] | None = None
    # The learned head proposes what the source does not (`learned`).
    head: bool = False

    @property
    def proposes(self) -> bool:
        """True if decode steps have drafts."""
        return self.make_source is not None or self.head


# `rollout.draft`. The only place where a source's name is written.
DRAFT_SOURCES: dict[str, DraftChoice] = Table(
    "DRAFT_SOURCES",
    {
        "none": DraftChoice(),
        "previous": DraftChoice(verifies_previous=True),
        "tree": DraftChoice(make_source=SuffixDrafts.from_config),
        "head": DraftChoice(head=True),
        "previous+tree": DraftChoice(verifies_previous=True, make_source=SuffixDrafts.from_config),
        "previous+head": DraftChoice(verifies_previous=True, head=True),
        "tree+head": DraftChoice(make_source=SuffixDrafts.from_config, head=True),
        "previous+tree+head": DraftChoice(
            verifies_previous=True, make_source=SuffixDrafts.from_config, head=True
        ),
    },
)
