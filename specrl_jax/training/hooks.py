"""Extension points of a run. launch/train.py uses `specrl_jax.standard_hooks`."""

import contextlib
from pathlib import Path
from typing import Any

from specrl_jax.models.config import ModelConfig
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import RunState


class Hooks:
    """Actions besides the steps of one run. This class does nothing."""

    def check_model(self, config: Any, model: ModelConfig, prompts: int) -> None:
        """Raise a one-line ValueError if this machine cannot train so large a model.

        prompts: to train on.
        """

    def fitted(self, run: Run) -> Run:
        """Return the run, adjusted to this machine."""
        return run

    def explaining(self, run: Run) -> contextlib.AbstractContextManager:
        """Return a context for everything that allocates after `build`; it may explain an error."""
        return contextlib.nullcontext()

    def recording(self, run: Run, log: RunLog) -> contextlib.AbstractContextManager:
        """Return a context for all that is recorded; its exit is the last chance to write."""
        return contextlib.nullcontext()

    def before_first_step(self, run: Run, state: RunState) -> None:
        """Act before the first step of this process."""

    def after_save(self) -> None:
        """Act after a checkpoint of a step."""

    def at_end(self, run: Run, workdir: Path, finished: bool) -> None:
        """Act in the primary process after everything is closed; finished: False after a stop."""
