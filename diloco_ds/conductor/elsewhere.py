"""Islands on other hosts: each says in the run directory where it is, and its link is started to there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from diloco_ds.rundir import RunDir, write_atomically

_HOST_OPTIONS = ("--host", "-host", "-H", "--hostfile", "-hostfile", "-f")


def announce(run: RunDir, island: str, host: str | None = None) -> None:
    """Say that the island is on this host, which is reached from the syncer's under the name `host` (default: its own)."""
    write_atomically(_file(run, island), host or socket.gethostname())


def host_of(run: RunDir, island: str) -> str | None:
    """Where the island said it is; None as long as it has not."""
    path = _file(run, island)
    return path.read_text().strip() if path.exists() else None


def any_elsewhere(run: RunDir) -> bool:
    """Whether any island of the run has ever said where it is."""
    return any(_file(run, "").parent.glob(_file(run, "*").name))


def link_arguments(link_args: Sequence[str], host: str) -> list[str]:
    """mpirun's arguments for a link from this host to `host`: the user's own, and the hosts unless they name them."""
    own = [str(argument) for argument in link_args]
    if any(argument.partition("=")[0] in _HOST_OPTIONS for argument in own):
        return own
    here = socket.gethostname()
    return [*own, "--host", f"{here}:2" if host == here else f"{here}:1,{host}:1"]


def _file(run: RunDir, island: str) -> Path:
    return run.root / "status" / f"host.{island}"
