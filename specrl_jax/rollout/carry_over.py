"""State between two rollouts: `CarryOver` goes in, `RunAhead` and `Resumed` come out.

*Run-ahead* (SRT, arXiv 2601.09083): prompts of the next step are rolled out in slots that would be
idle, with that step's noise. Their tokens are drafts for the match rule, so they change nothing.

*Partial rollouts* (CoPRIS, arXiv 2511.05589; APRIL, 2509.18521): Q + X groups run, and the step
ends once Q of them are done. The others keep tokens and log-probs and are resumed in the next step.
This is off-policy: each token keeps the log-prob of the policy that sampled it, so the update's
ratio is its importance weight. Within a step short responses are done first; none is dropped.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.rows import Rows, where_rows
from specrl_jax.rollout.stop_strings import NOTHING, StopStrings, turn_ends
from specrl_jax.sharding import put, reshard, take_rows
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout, Source, StatePart, TokenColumns

# --- run-ahead ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunAhead(StatePart):
    """Responses begun for the next step."""

    drafts: Drafts  # [Q * G], length 0 for rows that were not begun
    prompt_ids: tuple[str, ...] = ()  # of the Q prompts; () before the first step

    @classmethod
    def empty(cls, rows: int, slots: int) -> "RunAhead":
        return cls(as_drafts(Rollout.empty(rows, slots)))

    def arrays(self) -> Drafts:
        return self.drafts

    def host(self) -> tuple[str, ...]:
        return self.prompt_ids

    def restore(self, host, arrays: Drafts) -> "RunAhead":
        return RunAhead(arrays, tuple(host))

    def drafts_for(self, prompts: Prompts, previous: Drafts | None = None) -> Drafts:
        """Return the drafts of rows that were begun for `prompts`; of other rows `previous`.

        previous: [Q * G]; None: other rows have no draft.
        """
        return _over(self.drafts, previous, np.bool_(self._is_of(prompts)))

    def history(self, prompts: Prompts) -> DraftHistory:
        """Return the responses begun for `prompts`, on every device, for the draft source.

        tokens [Q, 1, G, R]; lens [Q, 1, G], all 0 if they were begun for other prompts.
        """
        groups = (len(prompts.examples), 1, -1)
        tokens = reshard(self.drafts.tokens, None, None)
        lens = reshard(self.drafts.lens, None).reshape(groups)
        tokens = tokens.reshape(*groups, tokens.shape[1])
        return tokens, lens if self._is_of(prompts) else jnp.zeros_like(lens)

    def _is_of(self, prompts: Prompts) -> bool:
        return self.prompt_ids == tuple(e.prompt_id for e in prompts.examples)


def as_drafts(responses: Rollout | Drafts) -> Drafts:
    """Return responses as drafts for the match rule, which reads tokens and lengths alone."""
    return Drafts(responses.tokens, responses.lens)


@jax.jit
def _over(drafts: Drafts, previous: Drafts | None, own: Array) -> Drafts:
    begun = (drafts.lens > 0) & own
    if previous is None:
        return dataclasses.replace(drafts, lens=jnp.where(begun, drafts.lens, 0))
    previous = as_drafts(previous)
    return jax.tree.map(lambda new, old: where_rows(begun, new, old), drafts, previous)


# --- partial rollouts -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resumed(StatePart):
    """Unfinished groups, between two steps."""

    rows: PartialRows  # [X * G]; the first len(prompt_ids) groups are in use
    prompt_ids: tuple[str, ...] = ()
    # By group and sample: the step whose noise the row uses to its end.
    noise_steps: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def empty(cls, rows: int, slots: int, k: int = 0) -> "Resumed":
        """Return X * G = `rows` empty rows of `slots` response slots; k: likeliest tokens kept."""
        rollout = Rollout.empty(rows, slots, k)
        return cls(PartialRows(rollout, rollout.lens > 0, rollout.lens))

    def arrays(self) -> PartialRows:
        return self.rows

    def host(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        return self.prompt_ids, self.noise_steps

    def restore(self, host, arrays: PartialRows) -> "Resumed":
        prompt_ids, noise_steps = host
        return Resumed(arrays, tuple(prompt_ids), tuple(map(tuple, noise_steps)))


@jax.jit
def without_drafts(drafts: Drafts, rows: Array) -> Drafts:
    """Return drafts [B], of length 0 in the rows marked in `rows` bool [B], on host or device."""
    return dataclasses.replace(drafts, lens=jnp.where(reshard(rows, "batch"), 0, drafts.lens))


@jax.jit
def restore(all_rows: Rows, begun: PartialRows) -> Rows:
    """Return all rows with the tokens and state that they hold already, [B]."""
    have = begun.rollout.lens > 0
    margin = all_rows.tokens.shape[1] - begun.rollout.tokens.shape[1]

    def write(old: Array, new: Array) -> Array:
        wide = jnp.pad(new, ((0, 0), (0, margin), *((0, 0),) * (new.ndim - 2)))
        return where_rows(have, wide, old)

    rollout = begun.rollout
    columns = jax.tree.map(write, TokenColumns.of(all_rows), TokenColumns.of(rollout))
    last = read_slots(columns.tokens, jnp.maximum(rollout.lens - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=jnp.where(have, rollout.lens, all_rows.lens),
        last=jnp.where(have, last, all_rows.last),
        prefix_lens=jnp.where(have, rollout.prefix_lens, all_rows.prefix_lens),
        done=begun.done,
        sources=write(all_rows.sources, rollout.sources),
        **vars(columns),
    )


@dataclasses.dataclass(frozen=True)
class CarryOver:
    """Drafts and rows that a rollout takes up from earlier ones, and limits at which it may end."""

    drafts: Drafts | None = None  # [Q * G], for the acceptance rule to verify
    log_lenience: float = 0.0  # log ℓ of the rule in nats, in [-inf, inf]
    # Stored responses for the draft source: of the prompts, then of the next step's prompts.
    history: DraftHistory | None = None
    next_prompts: Prompts | None = None  # of step + 1, for run-ahead
    next_noise_steps: np.ndarray | None = None  # int [Q, G], of `next_prompts`; None: step + 1
    resumed: Resumed | None = None  # unfinished groups; their prompts come first in `prompts`
    stop_after_groups: int = 0  # finished groups at which the rollout may end; 0: all
    fillers: int = 0  # prompts, the last ones, that only fill the rollout's shape
    # [Q * G], what rows already hold, from forks. A draft begins with what its row holds.
    partial_rows: PartialRows | None = None


# --- turns ----------------------------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnames="all_rows")
def append_forced(all_rows: Rows, tokens: Array, lens: Array, answered: Array) -> Rows:
    """Append the first `lens` [B] of `tokens` [B, O] to the rows marked in `answered` bool [B].

    No policy drew these tokens. The rows go on with another turn.
    """
    columns = all_rows.tokens.shape[1]
    positions = jnp.arange(columns)[None, :]
    ends = all_rows.lens + jnp.where(answered, lens, 0)
    new = (positions >= all_rows.lens[:, None]) & (positions < ends[:, None])
    wide = jnp.pad(all_rows.tokens, ((0, 0), (0, tokens.shape[1])))
    moved = write_slots(wide, tokens, all_rows.lens)[:, :columns]

    def clear(x: Array) -> Array:
        return jnp.where(jnp.expand_dims(new, tuple(range(2, x.ndim))), jnp.zeros_like(x), x)

    cleared = jax.tree.map(clear, TokenColumns.of(all_rows))
    written = jnp.where(new, moved, all_rows.tokens)
    last = read_slots(written, jnp.maximum(ends - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=ends,
        last=jnp.where(answered, last, all_rows.last),
        done=all_rows.done & ~answered,
        sources=jnp.where(new, jnp.int8(Source.FORCED), all_rows.sources),
        **vars(cleared) | {"tokens": written},
    )


@functools.partial(jax.jit, static_argnames=("eos_ids", "stop"))
def turn_drafts(
    drafts: Drafts,
    holds: Rollout | Rows | None,
    done: Array | None,
    eos_ids: tuple[int, ...],
    stop: StopStrings | None = None,
) -> Drafts:
    """Return drafts [B], each cut at the end of the turn that its row is about to take.

    A draft counts only if it begins with all tokens that its row holds; else its length is 0. Its
    length includes these tokens.

    holds: tokens of the rows; None: they hold nothing. done: bool [B], rows that get no draft; used
    with `holds` alone.
    """
    slots = drafts.tokens.shape[1]
    positions = jnp.arange(slots)[None, :]
    begin = jnp.zeros_like(drafts.lens) if holds is None else holds.lens
    same = drafts.lens > begin
    if holds is not None:
        differ = (drafts.tokens != holds.tokens[:, :slots]) & (positions < begin[:, None])
        same &= ~jnp.any(differ, axis=1) & ~done
    own = jnp.where(positions < begin[:, None], NOTHING, drafts.tokens)
    before = ((0, 0), (stop.window if stop else 0, 0))
    ends = turn_ends(eos_ids, stop, jnp.pad(own, before, constant_values=NOTHING))
    ends &= (positions >= begin[:, None]) & (positions < drafts.lens[:, None])
    first = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    lens = jnp.where(jnp.any(ends, axis=1), first, drafts.lens)
    return dataclasses.replace(drafts, lens=jnp.where(same, lens, 0))


# --- forks ----------------------------------------------------------------------------------------


@jax.jit
def fork_rows(rollout: Rollout, parents: Array, lens: Array) -> Rollout:
    """Return rows [B], each of which begins with the first tokens of its parent row.

    parents, lens: int32 [B]. A row that is its own parent stays as it is.
    """
    taken = take_rows(rollout, parents)
    own = reshard(parents == jnp.arange(len(parents)), "batch")
    lens = reshard(lens, "batch")
    copied = jnp.arange(rollout.tokens.shape[1])[None, :] < lens[:, None]
    sources = jnp.where(copied, jnp.int8(Source.COPIED), jnp.int8(Source.SAMPLED))
    return dataclasses.replace(
        taken,
        lens=jnp.where(own, taken.lens, lens),
        prefix_lens=jnp.where(own, taken.prefix_lens, 0),
        sources=where_rows(own, taken.sources, sources),
    )


# --- rows -----------------------------------------------------------------------------------------


def take(tree, row_ids: np.ndarray, rows: int | None = None):
    """Return rows `row_ids` int [n] of a pytree of [B, ...], then zeros up to `rows` rows."""
    picks = np.full((rows or len(row_ids), 2), -1)
    picks[: len(row_ids), 0] = 0
    picks[: len(row_ids), 1] = row_ids
    return assemble([tree], picks)


def assemble(parts: Sequence, picks: np.ndarray):
    """Return a pytree of [n, ...], whose rows come from several pytrees of [B, ...].

    picks: int [n, 2], (number of the part, row in that part) for each row of the result. Part -1
    gives a row of zeros, which holds no tokens.
    """
    result = None
    for number, part in enumerate(parts):
        here = picks[:, 0] == number
        index = np.where(here, picks[:, 1], 0).astype(np.int32)
        result = _fill(result, part, put(index, None), put(here, "batch"))
    return result


@jax.jit
def _fill(result, part, index: Array, here: Array):
    """Write rows `index` of a part into the rows marked in `here`; result None: zeros elsewhere."""
    taken = take_rows(part, index)
    before = jax.tree.map(jnp.zeros_like, taken) if result is None else result
    return jax.tree.map(lambda new, old: where_rows(here, new, old), taken, before)
