"""The conductor of one run: starts its parts, keeps them running, shows how it goes, and brings it to its end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from diloco_ds.conductor import ending, lock, marks
from diloco_ds.conductor.closing import Closing
from diloco_ds.conductor.elsewhere import host_of
from diloco_ds.conductor.evaluations import Evaluations
from diloco_ds.conductor.joining import Turnover
from diloco_ds.conductor.part import Part
from diloco_ds.conductor.parts import Parts
from diloco_ds.conductor.screen import Screen
from diloco_ds.conductor.stops import Stops
from diloco_ds.conductor.summary import summary
from diloco_ds.config import RunConfig
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.observe.status import RunState
from diloco_ds.observe.status_files import StatusFile, SyncerFile, read_status_file
from diloco_ds.rundir import RunDir, write_json

POLL_S = 0.2
STRAGGLERS_WITHIN_S = 60.0
"""How long an island may take to end once the run is finished."""
FAILED = 1

log = logging.getLogger(__name__)


class Conductor:
    """Conducts `run` until it is finished, stopped or beyond help. UserError if another conductor does so already.

    With `islands` False the islands are started elsewhere (diloco-ds island), and only watched.
    """

    def __init__(
        self, run: RunDir, config: RunConfig, stops: Stops, console: Console, *, islands: bool = True
    ) -> None:
        self._lock = lock.hold(run)
        self._run, self._config, self._stops = run, config, stops
        self._run_id = run.run_id()
        self._metrics = MetricsFile(run.metrics)
        self._elsewhere = not islands
        self._hosts: dict[str, str] = {}  # of islands elsewhere, as the links know them
        self._parts = Parts.of(run, config, islands=islands)
        self._turnover = Turnover(run, self._parts, islands=islands)
        self._evaluations = Evaluations(run, self._run_id, self._tell)
        self._screen = Screen(run, console)
        self._started = time.time()
        self._state: RunState = "preparing"
        self._reason = ""
        self._finished_at: float | None = None

    def tell_changes(self, changed: Sequence[str]) -> None:
        """Say, and write into the metrics, what the run goes on with that was different before."""
        for each in changed:
            self._screen.say(f"changed {each}")
        self._tell("settings_changed", "; ".join(changed))

    def conduct(self) -> int:
        """Conduct the run to its end; the program's exit code."""
        with self._screen:
            self._begin()
            code = self._go_on()
            self._screen.update(at_once=True)
        self._metrics.close()
        for line in summary(self._run, self._state, self._reason):
            self._screen.say(line)
        return code

    def _begin(self) -> None:
        """Take over what an earlier conductor left running, clear away what is stale, start the rest."""
        taken = self._parts.take_over(self._run)
        known = {part.pid for part in taken if part.pid is not None}
        marks.kill(lambda: marks.strays(self._run_id, known))
        if self._syncer_said("finished"):
            self._parts.syncer.end("finished")
        self._clear_stale_status(taken)
        self._start_missing(sweep=not taken)
        over = ", ".join(part.role for part in taken)
        self._set_state("preparing", "")
        self._tell("started", f"took over {over}" if over else "all parts started")

    def _start_missing(self, *, sweep: bool) -> None:
        """Start every part that does not run. If that fails, with `sweep`, nothing is left running."""
        try:
            for part in self._parts.all():
                if part.state == "new" and not self._parts.syncer.over and not self._waits_for_a_host(part):
                    part.start()
        except BaseException:
            if sweep:
                ending.sweep(self._run_id, keep_shared_memory=True)
            raise

    def _go_on(self) -> int:
        while not self._training_is_over():
            if self._stops.count:
                return self._stop(
                    f"{self._stops.signal.name if self._stops.signal else 'a stop'} was received"
                )
            self._look_after_parts()
            self._look_after_members()
            if self._state == "preparing" and self._syncer_said("running", *_CLOSING):
                self._set_state("running", "")
            if reason := self._beyond_help():
                return self._fail(reason)
            if self._parts.syncer.state == "ended" and not self._syncer_said("finished"):
                return self._stop(f"the syncer has stopped: {self._parts.syncer.reason}")
            self._evaluations.poll(begin=not self._syncer_said(*_CLOSING))
            self._screen.update()
            time.sleep(POLL_S)
        return self._finish()

    def _look_after_parts(self) -> None:
        if self._elsewhere:
            self._follow_islands()
        for part in self._parts.all():
            change = part.poll()
            if change is not None:
                self._tell(
                    _EVENTS[part.state], change, role=part.role.partition(".")[0], island=_island_of(part)
                )
                self._write_status()

    def _waits_for_a_host(self, part: Part) -> bool:
        """Whether it is the link of an island that has not said yet where it is."""
        links = self._parts.links
        return self._elsewhere and any(
            part is link and host_of(self._run, name) is None for name, link in links.items()
        )

    def _follow_islands(self) -> None:
        """Start the links of islands that have said where they are; end those of islands that have moved since."""
        for name, link in self._parts.links.items():
            host = host_of(self._run, name)
            moved = host is not None and host != self._hosts.get(name)
            if moved and link.state == "new":
                link.start()
                self._tell("started", f"link to {host}", role="link", island=name)
            elif moved and name in self._hosts:
                link.signal(signal.SIGKILL)
            if host is not None:
                self._hosts[name] = host

    def _look_after_members(self) -> None:
        for island, happened in self._turnover.poll():
            self._tell(happened, f"island {island} has {happened}", island=island)
            self._write_status()

    def _training_is_over(self) -> bool:
        """The syncer has finished and the islands have ended; islands that take too long are ended."""
        if not self._syncer_said("finished"):
            return False
        self._finished_at = self._finished_at or time.monotonic()
        left = [part for part in self._parts.supervisors.values() if part.state in ("running", "waiting")]
        if left and time.monotonic() - self._finished_at > STRAGGLERS_WITHIN_S:
            for part in left:
                part.signal(signal.SIGTERM)
        return not left and not self._parts.syncer.alive()

    def _beyond_help(self) -> str | None:
        """Why the run cannot go on, or None."""
        syncer = self._parts.syncer
        if syncer.state == "failed":
            return f"the syncer: {syncer.reason}"
        supervisors, links = self._parts.supervisors, self._parts.links
        lost = [name for name, link in links.items() if link.state == "failed"]
        lost += [name for name, part in supervisors.items() if part.state == "failed" and name not in lost]
        left, quorum = len(links) - len(lost), self._config.exchange.quorum
        if left >= quorum:
            return None
        reasons = dict.fromkeys(self._reason_of(name) for name in lost)
        why = "; ".join(
            f"{', '.join(name for name in lost if self._reason_of(name) == reason)}: {reason}"
            for reason in reasons
        )
        return f"{left} of {len(links)} islands are left, and exchange.quorum asks for {quorum}: {why}"

    def _reason_of(self, island: str) -> str:
        failed = [part for part in self._parts.all() if _island_of(part) == island and part.state == "failed"]
        return failed[0].reason.removeprefix("error: ")

    def _stop(self, reason: str) -> int:
        self._end_run("stopped", reason)
        return self._stops.exit_code if self._stops.count else FAILED

    def _fail(self, reason: str) -> int:
        self._end_run("failed", reason)
        return FAILED

    def _end_run(self, state: RunState, reason: str) -> None:
        """End everything with checkpoints; at a second request to stop at once."""
        self._set_state("stopping", reason)
        self._tell("stop", reason)
        self._screen.update(at_once=True)
        self._evaluations.cancel()
        ending.end_cleanly(self._parts, self._in_a_hurry)
        self._tell_of_what_is_cut_off()
        unsaved = not self._in_a_hurry() and not self._syncer_said("stopped", "finished")
        ending.sweep(self._run_id, keep_shared_memory=unsaved, here=self._here())
        if unsaved:
            reason += "; the syncer wrote no checkpoint, so its state is kept in shared memory"
        self._set_state(state, reason)

    def _tell_of_what_is_cut_off(self) -> None:
        if reason := ending.cut_off(self._parts):
            self._tell("warning", reason, role="observer")

    def _here(self) -> RunDir | None:
        return None if self._elsewhere else self._run

    def _in_a_hurry(self) -> bool:
        return self._stops.count > 1

    def _finish(self) -> int:
        """The run is finished: evaluate, export, leave nothing behind, report."""
        ending.end_chaos(self._parts, self._in_a_hurry)
        closing = Closing(self._run, self._run_id, self._evaluations, self._tell)
        if not self._carry_out(closing, closing.evaluate_and_export()):
            return self._stop(f"stopped during: {self._reason}")
        ending.end_rest(self._parts, self._in_a_hurry)
        self._tell_of_what_is_cut_off()
        ending.sweep(self._run_id, here=self._here())
        self._set_state("finished", "")
        self._tell("finished", "the token budget is merged")
        self._carry_out(closing, closing.report())
        self._set_state("finished", "; ".join(closing.failures))
        return FAILED if closing.failures else 0

    def _carry_out(self, closing: Closing, works: Iterator[str]) -> bool:
        """Do the works one after the other; False if a stop was asked for."""
        for work in works:
            self._set_state(self._state, work)
            while closing.busy():
                if self._stops.count:
                    closing.cancel()
                    return False
                self._screen.update()
                time.sleep(POLL_S)
        return True

    def _syncer_said(self, *states: str) -> bool:
        said = read_status_file(self._run, "syncer", SyncerFile)
        return said is not None and said.state in states

    def _clear_stale_status(self, taken: list[Part]) -> None:
        """Remove the status files of processes that are gone, so that nobody believes them."""
        for path in (self._run.root / "status").glob("*.json"):
            role = path.stem
            if role in ("conductor", "syncer") and self._parts.syncer.over:
                continue
            said = read_status_file(self._run, role, StatusFile)
            if said is None or not said.alive:
                path.unlink(missing_ok=True)

    def _set_state(self, state: RunState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._write_status()

    def _write_status(self) -> None:
        records = {part.role: record for part in self._parts.all() if (record := part.record())}
        content: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "state": self._state,
            "reason": self._reason or None,
            "parts": records,
        }
        try:
            write_json(self._run.status("conductor"), content)
        except OSError as error:  # a full disk must not end the run
            log.warning("%s cannot be written: %s", self._run.status("conductor"), error)

    def _tell(self, event: str, reason: str, *, role: str = "conductor", island: str | None = None) -> None:
        fields = {"island": island} if island else {}
        self._metrics.write("event", event=event, role=role, reason=reason, **fields)


_CLOSING = ("draining", "finished")
"""States of a syncer that has as good as all tokens: what is evaluated now are the final weights."""

_EVENTS = {"waiting": "died", "running": "restart", "ended": "ended", "failed": "given_up", "new": "created"}


def _island_of(part: Part) -> str | None:
    return part.role.partition(".")[2] or None
