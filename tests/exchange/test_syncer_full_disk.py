"""The syncer where files cannot grow: it lives on, tells nobody of a lease that is not on record, and catches up."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from types import SimpleNamespace

from syncer_run import both, events, play, status, tape, versions_at_least

from diloco_ds import membership
from diloco_ds.config import Island
from diloco_ds.core.events import Orders, Phase
from diloco_ds.core.lease import unflat
from diloco_ds.core.ledger import Ledger
from diloco_ds.exchange.ledger_record import LedgerRecord
from diloco_ds.exchange.syncer_checkpoint import checkpoints


def recorded(run):
    """The ledger as a syncer after this one would find it."""
    return json.loads((run.shared.store / "ledger.json").read_text())


def newest_lease(learner):
    """The highest number among the leases in its orders."""
    return max((lease.number for lease in unflat(learner.orders.leases)), default=0)


def have_read_all(learners):
    """A condition for `play`: none of them has a lease that is not read to its end."""
    return lambda: not any(each.reading.has_lease(each.orders) for each in learners)


def blocked(run, pid):
    """A folder in the place of the file through which the ledger is written: no write of it can succeed."""
    path = run.shared.store / f".ledger.json.{pid}.partial"

    def made():
        try:
            path.mkdir()
        except FileExistsError:  # it is being written just now
            return False
        return True

    play(run, [], made)
    return path


def test_nobody_is_told_of_a_lease_that_is_not_on_record_and_merges_go_on(new_run):
    run = new_run()
    pid = run.start()
    learners = a, _ = both(run)
    play(run, learners, lambda: all(each.reading.position[0] for each in learners))
    block = blocked(run, pid)
    play(run, learners, have_read_all(learners))
    newest = recorded(run)["number"]
    granted = lambda: max(value.lease for kind, value, _ in tape(run) if kind == "Grant")  # noqa: E731
    play(run, learners, lambda: granted() > newest)
    version = min(a.base)
    play(run, learners, versions_at_least(a, version + 2))
    assert recorded(run)["number"] == newest
    assert max(newest_lease(each) for each in learners) <= newest
    assert have_read_all(learners)()
    (warning,) = events(run, "warning")
    assert "nobody gets a lease until it is" in warning["reason"]
    block.rmdir()
    play(run, learners, lambda: min(newest_lease(each) for each in learners) > newest)
    assert recorded(run)["number"] >= max(newest_lease(each) for each in learners)
    assert len(events(run, "ledger_recorded")) == 1

    blocked(run, pid)
    os.kill(pid, signal.SIGTERM)
    codes = []
    play(run, learners, lambda: codes.append(run.ended(pid)) or codes[-1] is not None)
    assert codes[-1] == 0, "a record that fails at the end is no reason not to save what there is"
    state = json.loads((checkpoints(run.dir.syncer_checkpoints)[-1] / "state.json").read_text())
    assert state["ledger"] == recorded(run)
    assert len(events(run, "started")) == 1


def test_where_no_file_can_grow_the_syncer_lives_merges_and_catches_up(new_run):
    run = new_run(syncer={"checkpoint_every_s": 0.1, "keep_updates": True})
    pid = run.start()
    learners = a, _ = both(run)
    play(run, learners, versions_at_least(a, 1))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    play(run, learners, have_read_all(learners))
    before = run.shared.root.stat().st_mtime_ns
    membership.add(run.dir, membership.Joining(island=Island(name="c"), number=0))
    play(
        run, learners, lambda: run.shared.root.stat().st_mtime_ns != before
    )  # it has tried to make a mailbox
    version = min(a.base)
    play(run, learners, versions_at_least(a, version + 2))
    assert not run.shared.syncer_end("c").exists()
    hidden = lambda: list(run.shared.store.glob(".*")) + list(run.dir.status("x").parent.glob(".*"))  # noqa: E731
    play(run, [], lambda: not hidden())
    assert run.ended(pid) is None

    saved = lambda: [path.name for path in checkpoints(run.dir.syncer_checkpoints)]  # noqa: E731
    before = saved()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    play(run, learners, lambda: run.shared.syncer_end("c").exists())
    play(run, learners, lambda: saved() != before)
    play(run, learners, lambda: events(run, "ledger_recorded"))
    assert status(run)["generation"] == 1
    assert run.ended(pid) is None
    kinds = [kind for kind, _, _ in tape(run)]
    assert kinds.count("Header") == 1
    assert kinds.count("Merged") >= 3 * (version + 2)


def test_nobody_is_told_of_a_drain_that_is_not_on_record():
    """A syncer after this one would not know of it, and wait for islands that have ended."""

    class Full:
        def remember_drain(self, reason):
            raise OSError(28, "No space left on device")

        def remember_ledger(self, state):
            """It would fit."""

    told = []
    tenure = SimpleNamespace(check=lambda: None)
    record = LedgerRecord(Ledger(1, 1), Full(), tenure, lambda event, reason: told.append(event))
    run, drain = Orders("run", 5, 50, (4,)), Orders("drain", 6, 60, (5,))
    assert record.allowed(run, None) == run
    record.take([Phase("drain", "the budget is reached")])
    assert record.allowed(drain, run) == replace(drain, phase="run")
    assert record.allowed(drain, None) == replace(drain, phase="run")
    Full.remember_drain = lambda self, reason: None
    record.write()
    assert record.allowed(drain, run) == drain
    assert told == ["warning", "ledger_recorded"]
