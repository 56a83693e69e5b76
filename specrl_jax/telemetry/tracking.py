"""A run's metrics on wandb. A failure of wandb is one warning; training goes on."""

import contextlib
import logging
import netrc
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

_log = logging.getLogger(__name__)


def _logged_in() -> bool:
    """Whether wandb has a key. Without one it would ask, or block."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def resolve_wandb_mode(mode: str) -> str:
    """The mode to use; "auto" is $WANDB_MODE if set, else online if logged in, else offline."""
    if mode != "auto":
        return mode
    if environment_mode := os.environ.get("WANDB_MODE", ""):
        return environment_mode if environment_mode in ("online", "offline") else "off"
    return "online" if _logged_in() else "offline"


class WandbRun:
    """A wandb run. Its first failure is a warning; after that it does nothing."""

    def __init__(self, workdir: Path, mode: str, run_name: str, config: Mapping[str, Any]):
        self._run = None
        # Without a network, an online run becomes offline, for `wandb sync`.
        for attempt in {"off": (), "online": ("online", "offline")}.get(mode, (mode,)):
            with self._failure_is_a_warning(attempt):  # not installed, no network, no key, or a bug
                self._run = _start(workdir, attempt, run_name, config)
                return

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._run is not None:
            with self._failure_is_a_warning("logging"):
                self._run.log({"epoch": epoch, **values}, step=step)

    def close(self) -> None:
        if self._run is not None:
            with self._failure_is_a_warning("closing"):
                self._run.finish()
            self._run = None

    @contextlib.contextmanager
    def _failure_is_a_warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            reason = (str(error).splitlines() or [""])[0]
            _log.warning("wandb: %s failed, training goes on: %r", what, reason)


def _start(workdir: Path, mode: str, run_name: str, config: Mapping[str, Any]) -> Any:
    import wandb

    id_file = workdir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "specrl_jax"),
        name=run_name,
        id=id_file.read_text().strip(),
        resume="allow" if mode == "online" else None,
        dir=str(workdir),
        mode=mode,
        config=dict(config),
        # console="off": wandb would replace stdout, and the progress bar writes there.
        settings=wandb.Settings(console="off", silent=True, init_timeout=30),
    )
