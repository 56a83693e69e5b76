"""Hooks of launch/train.py: compile programs ahead of time, explain errors, write the report."""

import contextlib
from pathlib import Path
from typing import Any

from specrl_jax.compile import fit, memory, programs
from specrl_jax.compile.shapes import AbstractRun
from specrl_jax.models.config import ModelConfig
from specrl_jax.reports.report_page import FILE_NAME as REPORT
from specrl_jax.reports.report_page import ReportWriter
from specrl_jax.reports.runs import read_run, summarize
from specrl_jax.training.hooks import Hooks
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import RunState


class StandardHooks(Hooks):
    """Hooks of one run: each run needs its own."""

    def check_model(self, config: Any, model: ModelConfig, prompts: int) -> None:
        """Refuse a model whose largest arrays do not fit in this machine's memory."""
        memory.check(config, model, prompts)

    def fitted(self, run: Run) -> Run:
        """Return the run with the rows that fit its devices."""
        return fit.fit_rows_to_memory(run)

    def explaining(self, run: Run) -> contextlib.AbstractContextManager:
        """Explain an out-of-memory error."""
        return memory.explain_shortage(run.config, run.model, len(run.prompts.lens))

    def recording(self, run: Run, log: RunLog) -> contextlib.AbstractContextManager:
        """Write the report page at the end, however the run ends."""
        self._page = ReportWriter(log.workdir, log.writes and run.config.log.report, log.show)
        return contextlib.closing(self._page)

    def before_first_step(self, run: Run, state: RunState) -> None:
        """Compile the run's programs in parallel."""
        kept = state.arrays()
        # A reference that is re-read from its source is not in the checkpoint, but takes memory.
        if state.reference:
            kept["reference"] = (state.reference.params, state.reference.adapters)
        if run.frozen:
            kept["frozen"] = run.frozen.params
        programs.compile_run(AbstractRun.of(run), kept)

    def after_save(self) -> None:
        """Refresh the report page."""
        self._page.refresh()

    def at_end(self, run: Run, workdir: Path, finished: bool) -> None:
        """Print the report's path, and a summary if the run has finished."""
        if run.config.log.report:
            print(f"report: {workdir / REPORT}")
        if finished:
            print(summarize(read_run(workdir)))
