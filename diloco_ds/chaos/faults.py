"""What each kind of fault does to a live run. Real signals, real limits, real bytes; nothing here is a flag that a
process looks at.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import get_args

import psutil

from diloco_ds.chaos.schedule import RANDOM, Fault, Garbage
from diloco_ds.chaos.signals import limit_files, resumed_after, send, throttled
from diloco_ds.chaos.targets import NotThere, Targets
from diloco_ds.rundir import RunDir, SharedMemory


@dataclass(frozen=True)
class Done:
    """A fault that has begun: what was done, to which processes, and what is still to come.

    `rest` yields the seconds until its next turn; when it ends, or is closed, the fault is over.
    """

    target: str
    what: str
    pids: list[int]
    rest: Generator[float] | None = None


def get_ready(kinds: Iterable[str]) -> None:
    """Load what faults of these kinds need, which takes seconds: a fault shall not come late because of that."""
    if {"lose", "garbage"} & set(kinds):
        from diloco_ds.chaos import garbage  # noqa: F401
        from diloco_ds.exchange import mailbox  # noqa: F401


def inject(run: RunDir, fault: Fault, choose: random.Random) -> Done:
    """Do it now. NotThere if what it is aimed at does not run; what is left to chance is drawn from `choose`."""
    targets = Targets(run)
    target = _drawn(fault, targets, choose)
    return _DOING[fault.fault](run, targets, fault.model_copy(update={"target": target}), choose)


def _drawn(fault: Fault, targets: Targets, choose: random.Random) -> str:
    if fault.kind.aims_at == "run":
        return "syncer" if fault.fault == "syncer" else "run"
    if fault.target != RANDOM:
        return fault.target
    islands = targets.living_islands()
    if not islands:
        raise NotThere("no island runs")
    return choose.choice(islands)


def _kill(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    victims = targets.processes(fault.target)
    send(victims, signal.SIGKILL)
    return _done(fault, "SIGKILL", victims)


def _link(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    victims = targets.processes(f"{fault.target}.mpirun")
    send(victims, signal.SIGKILL)
    return _done(fault, "SIGKILL to the mpirun of its link", victims)


def _hang(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    victims = targets.processes(fault.target)
    send(victims, signal.SIGSTOP)
    return _done(fault, f"SIGSTOP for {fault.lasts:g} s", victims, resumed_after(victims, fault.lasts))


def _slow(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    victims = targets.processes(fault.target)
    what = f"{fault.factor:g} times slower for {fault.lasts:g} s"
    return _done(fault, what, victims, throttled(victims, fault.lasts, fault.factor))


def _cut(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    """Both ends of a link on one host talk through shared memory: there is no wire to cut but their own running."""
    victims = targets.link(fault.target)
    send(victims, signal.SIGSTOP)
    what = f"no traffic on its link for {fault.lasts:g} s"
    return _done(fault, what, victims, resumed_after(victims, fault.lasts))


def _heal(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    victims: list[psutil.Process] = []
    for find in (targets.host, targets.link):
        with contextlib.suppress(NotThere):
            victims += find(fault.target)
    if not victims:
        raise NotThere(f"nothing of {fault.target} runs")
    send(victims, signal.SIGCONT)
    return _done(fault, "SIGCONT", victims)


def _lose(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    """All of it in one moment: stopped first, so that nobody sees another one die."""
    from diloco_ds.exchange.mailbox import Mailbox  # imports torch

    victims = targets.host(fault.target)
    send(victims, signal.SIGSTOP)
    with contextlib.suppress(FileNotFoundError):
        Mailbox.open(SharedMemory(targets.status.run_id).island_end(fault.target)).destroy()
    send(victims, signal.SIGKILL)
    return _done(fault, "SIGKILL to supervisor, learner and agent, mailbox removed", victims)


def _disk(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    """Every write(2) that would make a file grow fails, as on a full disk (with EFBIG where that says ENOSPC)."""
    victims = targets.writers()
    what = f"no file can grow for {fault.lasts:g} s"
    return _done(fault, what, victims, _full_disk(run, victims, fault.lasts))


def _full_disk(run: RunDir, victims: list[psutil.Process], seconds: float) -> Generator[float]:
    limit_files(victims, 0)
    try:
        yield seconds
    finally:
        limit_files(victims, None)
        with contextlib.suppress(NotThere):  # children born meanwhile have inherited it
            limit_files(Targets(run).writers(), None)


def _garbage(run: RunDir, targets: Targets, fault: Fault, choose: random.Random) -> Done:
    from diloco_ds.chaos.garbage import write_garbage  # imports torch

    what: Garbage = fault.what if fault.what else choose.choice(get_args(Garbage))
    ranks = targets.processes(fault.target)
    fragment = write_garbage(targets.status.run_id, fault.target, what, ranks, choose)
    return _done(fault, f"{what} update of fragment {fragment} in its outbox", [])


def _done(
    fault: Fault, what: str, victims: list[psutil.Process], rest: Generator[float] | None = None
) -> Done:
    return Done(fault.target, what, [process.pid for process in victims], rest)


_DOING: dict[str, Callable[[RunDir, Targets, Fault, random.Random], Done]] = {
    "kill": _kill,
    "hang": _hang,
    "slow": _slow,
    "cut": _cut,
    "heal": _heal,
    "link": _link,
    "lose": _lose,
    "syncer": _kill,
    "disk": _disk,
    "garbage": _garbage,
}
