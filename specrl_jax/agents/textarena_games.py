"""Games of the TextArena package for one player, as environments: `textarena:GAME`.

A problem is a game and a seed, its answer. The policy reads the game's messages since its last
move: the package's own observations repeat everything said before. No JAX.
"""

import importlib
import random
from typing import Any

import numpy as np
import textarena
from textarena import ObservationType
from textarena.envs.registration import ENV_REGISTRY

from specrl_jax.agents.environment_protocol import Step
from specrl_jax.inputs import one_line

# Games that would teach a policy the wrong thing, by class, and why.
_WRONG_REWARDS = {"BanditEnv": "TextArena pays its best button 0, and its worst one the most"}


class Game:
    """A game; `load_game` makes a class for each. Its own reward ends it."""

    replayable = True  # it draws from the generators that `begin` seeds
    pays_at_end = True

    name = ""

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self.begin(int(answer), metadata.get("options") or {})

    def begin(self, seed: int, options: dict[str, Any]) -> str:
        """Start the game with a seed; return its first message.

        options: parameters of the game's class that override those implied by its name.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - some games draw from it
        self._game = textarena.make(self.name, **options)
        self._game.reset(num_players=1, seed=seed)
        return self._read()

    def step(self, response: str) -> Step:
        done, _ = self._game.step(response)
        if not done:
            return Step(self._read())
        rewards, _ = self._game.close()
        return Step(reward=(rewards or {}).get(0, 0.0), done=True)

    def _read(self) -> str:
        """Return the messages since the last move, without the move itself."""
        said = self._game.state.get_current_player_observation()
        move = ObservationType.PLAYER_ACTION
        return "\n".join(text.strip() for _, text, kind in said if kind != move)


class ScoredGame(Game):
    """A game that reports its progress."""

    def begin(self, seed: int, options: dict[str, Any]) -> str:
        first = super().begin(seed, options)
        self._at_start = _worth(self._game)
        return first

    def score(self) -> float:
        """Return what the game pays at its own last turn, 0 if it has not got that far."""
        worth = _worth(self._game)
        return worth if worth > self._at_start else 0.0


_WORTH = "_get_percentage_completion"  # a game's name for its progress
_COUNTS = ("SetEnv",)  # classes of games that pay the score they keep


def _says_worth(game: type[textarena.Env]) -> bool:
    return hasattr(game, _WORTH) or game.__name__ in _COUNTS


def _worth(game: textarena.Env) -> float:
    if hasattr(game, _WORTH):
        return float(getattr(game, _WORTH)())
    return float(game.state.game_state["score"])


def load_game(name: str) -> type[Game]:
    """Return the environment of a game in the package. Raises a one-line ValueError."""
    with one_line(f"a game of TextArena must be for one player and run here, got {name!r}"):
        if name not in ENV_REGISTRY:
            alike = [game for game in ENV_REGISTRY if game.startswith(f"{name}-v")]
            raise ValueError(f"there is {', '.join(alike[:3]) or 'no such game'}")
        path, _, game = ENV_REGISTRY[name].entry_point.partition(":")
        if game in _WRONG_REWARDS:
            raise ValueError(_WRONG_REWARDS[game])
        scored = _says_worth(getattr(importlib.import_module(path), game))
    return type("Game", (ScoredGame if scored else Game,), {"name": name})
