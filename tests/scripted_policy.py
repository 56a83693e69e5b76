"""A policy that follows a script, in place of a rollout: episodes by hand."""

import dataclasses

import numpy as np
from rollout_reference import make_spec

from specrl_jax.agents.episodes import Episodes
from specrl_jax.agents.responder import EpisodeResponder
from specrl_jax.data.prompts import encode_prompts, make_example
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.text.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer("".join(map(chr, range(32, 127))) + "\n")
END = 1
TAGS = ThoughtTags.parse("<think> </think> [THINK] [/THINK]")


class Script:
    """Rollout of one row an episode, as `agents.turns.EpisodeRollout`; `script` has its turns.

    A turn ends with the end of sequence, or with the stop string that it has; one that is too long
    is cut.
    """

    def __init__(self, spec, script):
        self.spec = spec
        self.script = [list(turns) for turns in script]
        rows = len(script)
        self.tokens = np.zeros((rows, spec.response_slots), np.int32)
        self.lens = np.zeros(rows, np.int32)
        self.done = np.zeros(rows, bool)

    def run(self, share):
        for row in np.flatnonzero(~self.done):
            turn = self.script[row].pop(0)
            ids = TOKENIZER.encode(turn)
            stops = self.spec.stop.strings if self.spec.stop else ()
            if not turn.endswith(stops or "\0"):
                ids.append(END)
            self._append(row, ids)
            self.done[row] = True
        return self.tokens, self.lens.copy(), self.done.copy()

    def resume(self, answers, over):
        for row, ids in answers.items():
            self._append(row, ids)
            self.done[row] = False

    def _append(self, row, ids):
        ids = ids[: self.spec.response_slots - self.lens[row]]
        self.tokens[row, self.lens[row] : self.lens[row] + len(ids)] = ids
        self.lens[row] += len(ids)

    def result(self):
        return RolloutResult(None, self.done, np.zeros_like(self.lens), Stats())


@dataclasses.dataclass
class Played:
    rewards: np.ndarray
    reasons: tuple[str, ...]
    turns: np.ndarray  # rewards of turns
    cut: np.ndarray
    texts: list[str]  # of whole rows
    left: list[list[str]]  # turns that were not taken


def play(pool, problems, script, *, slots=400, max_turns=8, stop=(), prompt="?", **settings):
    """Play an episode of each problem (answer, task, metadata) with the turns of its script."""
    automaton = StopStrings.of(stop, TOKENIZER.token_texts()) if stop else None
    spec = make_spec(slots=slots, group=1, eos=(END,), stop=automaton, turns=True)
    examples = [make_example(prompt, *problem) for problem in problems]
    prompts = encode_prompts(examples, TOKENIZER, 64)
    settings = {"thought_tags": TAGS, "stop": automaton} | settings
    responder = EpisodeResponder(pool, TOKENIZER, max_turns=max_turns, **settings)
    rollout = Script(spec, script)
    episodes = Episodes(responder, prompts, rollout, Stopwatch())
    played = episodes.play()
    texts = [TOKENIZER.decode(row[:n].tolist()) for row, n in zip(rollout.tokens, rollout.lens)]
    return Played(
        played.rewards.rewards,
        played.rewards.reasons,
        played.turns.rewards,
        ~played.ended,
        texts,
        rollout.script,
    )
