"""State between two rollouts: `RunAhead` and `Resumed`.

*Run-ahead* (SRT, arXiv 2601.09083): prompts of the next step are rolled out in slots that would be
idle, with that step's noise. Their tokens are drafts for the match rule, so they change nothing.

*Partial rollouts* (CoPRIS, arXiv 2511.05589; APRIL, 2509.18521): Q + X groups run, and the step
ends once Q of them are done. The others keep tokens and log-probs and are resumed in the next step.
This is off-policy: each token keeps the log-prob of the policy that sampled it, so the update's
ratio is its importance weight. Within a step short responses are done first; none is dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.rows import Rows, where_rows
from specrl_jax.rollout.stop_strings import NOTHING, StopStrings, turn_ends
from specrl_jax.sharding import reshard
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout, StatePart

# --- drafts ---------------------------------------------------------------------------------------


def as_drafts(responses: Rollout | Drafts) -> Drafts:
    """Return responses as drafts for the match rule, which reads tokens and lengths alone."""
    return Drafts(responses.tokens, responses.lens)


@jax.jit
def without_drafts(drafts: Drafts, marked: Array) -> Drafts:
    """Return drafts [B], of length 0 in the rows that are `marked`, bool [B], on host or device."""
    return dataclasses.replace(drafts, lens=jnp.where(reshard(marked, "batch"), 0, drafts.lens))


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
