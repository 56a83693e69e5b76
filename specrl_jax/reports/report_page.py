"""A run's report: WORKDIR/report.html, one file that loads nothing.

Takes the work directories of one or several runs, finished or not. Charts are drawn by Plotly,
whose script is in the page. `report_page.html` is the page, with the viewer of the responses.
"""

import html
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from specrl_jax.reports import runs as reports
from specrl_jax.reports.report_charts import color, metric_charts, overview_charts
from specrl_jax.reports.rollout_viewer import viewer
from specrl_jax.telemetry.code_state import read_code

FILE_NAME = "report.html"

_VIEWER_BYTES = 30 << 20  # of all records that the page shows
_MOST_NAMES = 4  # of runs in the title
_MOST_OF_THE_TIME = 0.05  # share of the time that refreshing may take


def write_report(
    workdirs: Sequence[str | os.PathLike], file: str | os.PathLike, baseline: str = ""
) -> None:
    """Write the report of runs atomically.

    baseline: the series that the speed-ups of several are relative to, by default the first. Raises
    a one-line ValueError if a work directory is invalid or damaged, OSError if the file cannot be
    written.
    """
    runs = [reports.read_run(workdir) for workdir in workdirs]
    content = page(_data(runs, baseline))
    file = Path(file)
    partial = file.with_name(file.name + ".partial")
    try:
        partial.write_text(content, encoding="utf-8", errors="replace")
        partial.replace(file)
    except OSError as error:
        raise OSError(f"{file}: {error.strerror}; give another --out") from error


def page(data: dict[str, Any]) -> str:
    """Return the HTML of the page's data. All text in it stays text, whatever it contains."""
    from plotly.offline import get_plotlyjs

    # Without "<" no text can end the script element around it; the rest is ASCII.
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(data["title"]), "DATA": encoded, "PLOTLY": get_plotlyjs()}
    template = resources.files(__package__).joinpath("report_page.html").read_text("utf-8")
    return re.sub("__(TITLE|DATA|PLOTLY)__", lambda match: parts[match[1]], template)


def _data(runs: Sequence[reports.RecordedRun], baseline: str = "") -> dict[str, Any]:
    series = sorted(reports.series(runs), key=lambda case: case.name != baseline)
    colors = {case.name: color(i) for i, case in enumerate(series)} if len(series) > 1 else {}
    figures, reckoned = reports.shown_figures(series)
    limit = _VIEWER_BYTES // len(runs)
    steps = sorted({run.records[-1]["step"] if run.records else 0 for run in runs})
    names = dict.fromkeys(run.workdir.resolve().name for run in runs)
    if len(names) > _MOST_NAMES:
        names = [f"{runs[0].workdir.resolve().parent.name}, {len(runs)} runs"]
    return {
        "title": " · ".join(names)[:200],
        "written": f"{datetime.now():%Y-%m-%d %H:%M}, step {', '.join(map(str, steps))}",
        "code": "; ".join(dict.fromkeys(line for run in runs for line in read_code(run.workdir))),
        "series": [
            {
                "name": case.name,
                "runs": len(case.runs),
                "color": colors.get(case.name, ""),
                "figures": reports.headline(case, figures),
            }
            for case in series
        ],
        "fields": _fields(series),
        "reckoned": reckoned,
        "overview": overview_charts(series),
        "metrics": metric_charts(series),
        "viewer": [
            viewer(run, limit) | {"case": case.name} for case in series for run in case.runs
        ],
    }


def _fields(series: Sequence[reports.Series]) -> list[tuple[str, list[str]]]:
    """Return every field of the configurations, and its values in each series."""
    names = dict.fromkeys(name for case in series for run in case.runs for name in run.config)
    return [
        (name, [
            ", ".join(dict.fromkeys(str(run.config.get(name, "–")) for run in case.runs))
            for case in series
        ])
        for name in names
    ]  # fmt: skip


class ReportWriter:
    """Keeps a run's report up to date. A failure is one warning, and does not stop the run.

    active: False in processes that do not write. warn: shows a line to the user.
    """

    def __init__(self, workdir: Path, active: bool, warn: Callable[[str], None]):
        self._workdir = workdir
        self._active = active
        self._warn = warn
        self._seconds = 0.0
        self._written = -float("inf")

    def refresh(self) -> None:
        """Write the report, unless that would take more than a twentieth of the time."""
        waited = time.monotonic() - self._written
        if self._active and self._seconds <= _MOST_OF_THE_TIME * waited:
            self._write()

    def _write(self) -> None:
        start = time.monotonic()
        try:
            write_report([self._workdir], self._workdir / FILE_NAME)
        except Exception as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            self._warn(f"warning: no {FILE_NAME}, training continues: {reason}")
            self._active = False
        self._written = time.monotonic()
        self._seconds = self._written - start

    def close(self) -> None:
        if self._active:
            self._write()
