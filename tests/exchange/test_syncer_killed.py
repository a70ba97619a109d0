"""kill -9 of the syncer at every write, and what comes back, from shared memory or disk: no merge is lost or made twice."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from syncer_run import (
    SPECS,
    TOKENS,
    PlayedLearner,
    assert_same_history,
    both,
    events,
    learned,
    play,
    status,
    versions_at_least,
)

from diloco_ds.core.returning import VERSION_GAP
from diloco_ds.exchange.syncer_checkpoint import checkpoints
from diloco_ds.observe.metrics import read_metrics

AT_START = ("tenure.taken", "box.begun", "box.filled:2", "store.filled", "store.created")
IN_A_MERGE = (
    "box.claimed:2",
    "box.begun:7",
    "store.begun:4",
    "store.before_commit:8",
    "box.filled:9",
    "box.committed:8",
    "store.after_commit:9",
    "tape.appended:40",
    "record.invalidated:9",
    "record.filled:12",
    "store.ledger:2",
)
IN_A_CHECKPOINT = ("checkpoint.tensors:2", "checkpoint.before_rename:2", "checkpoint.after_rename:2")


@pytest.mark.parametrize("place", AT_START)
def test_killed_while_it_starts(new_run, reference, place):
    run = new_run()
    assert run.wait(run.start(at=place)) == -signal.SIGKILL
    run.start()
    learners = both(run)
    play(run, learners, versions_at_least(learners[0], 3))
    assert_same_history(run.history, reference)


@pytest.mark.parametrize("place", IN_A_MERGE + IN_A_CHECKPOINT)
def test_killed_at_any_write_no_merge_is_lost_or_done_twice(new_run, reference, place):
    run = new_run(syncer={"checkpoint_every_s": 0.02 if place in IN_A_CHECKPOINT else 3600.0})
    first = run.start(at=place)
    learners = both(run)
    codes = []

    def died():
        code = run.ended(first)
        if code is not None:
            codes.append(code)
        return bool(codes)

    play(run, learners, died)
    assert codes == [-signal.SIGKILL]
    box = run.theta()
    committed = [box.version(fragment) for fragment in range(3)]
    states = [run.state(fragment) for fragment in range(3)]
    run.start()
    play(run, learners, lambda: status(run).get("generation") == 2)
    for fragment in range(3):  # the state went on from exactly where it was
        assert torch.equal(
            run.history.get((fragment, committed[fragment]), states[fragment]), states[fragment]
        )
    play(run, learners, versions_at_least(learners[0], 6))
    assert_same_history(run.history, reference)
    merges = [(r["fragment"], r["version"]) for r in read_metrics(run.dir.metrics) if r["kind"] == "merge"]
    assert len(merges) == len(set(merges))
    if place not in IN_A_CHECKPOINT:
        assert not run.dir.syncer_checkpoints.exists()


def test_goes_on_within_moments_after_a_kill(new_run):
    """Answers that were in flight count when their rounds are opened again: no lease has to run out first."""
    run = new_run(syncer={"lease_s": 60.0})
    first = run.start(at="store.begun:4")
    learners = both(run)
    play(run, learners, lambda: run.ended(first) is not None)
    version = min(learners[0].base)
    run.start()
    play(run, learners, versions_at_least(learners[0], version + 2), seconds=20)


def test_the_next_syncer_knows_an_outlier_by_the_updates_of_the_one_before(new_run):
    run = new_run(exchange={"merge": {"outlier_factor": 50.0}}, syncer={"lease_s": 2.0})
    first = run.start()
    learners = a, _ = both(run)
    play(run, learners, versions_at_least(a, 4))  # eight updates of every fragment
    run.kill(first)
    a.adopt()
    a.answer(1, 0, values=learned(run, "a", 1, a.base[1]) + 1e4)  # the first that the next one sees
    run.start()
    play(run, [], lambda: status(run).get("drops_by_reason", {}).get("outlier", 0) == 1)
    assert status(run)["generation"] == 2
    play(run, learners, versions_at_least(a, 6))


def test_tokens_of_an_island_are_those_of_all_its_incarnations_whoever_the_syncer_is(new_run):
    run = new_run()
    first = run.start()
    a, b = learners = both(run)
    told = lambda island: status(run).get("islands", {}).get(island, {}).get("tokens")  # noqa: E731
    play(run, learners, versions_at_least(a, 2))
    play(run, [], lambda: told("a") == a.clock * TOKENS)
    run.kill(first)
    run.start()
    again = PlayedLearner(run, "a", incarnation=2)  # and its count begins anew
    play(run, [again, b], versions_at_least(again, 5))
    play(run, [], lambda: told("a") == (a.clock + again.clock) * TOKENS and told("b") == b.clock * TOKENS)
    shares = [r["token_share"] for r in read_metrics(run.dir.metrics) if r["kind"] == "merge"]
    assert all(0 < share <= 1 for share in shares)
    trained = (a.clock + again.clock + b.clock) * TOKENS
    newest = [r["tokens"] for r in read_metrics(run.dir.metrics) if r["kind"] == "merge"][-1]
    assert shares[-1] >= newest / trained, "what was trained since the last merge is not in its share"
    assert shares[-1] <= newest / (a.clock * TOKENS), "what the first incarnation trained is"


def test_resume_from_disk_after_the_shared_memory_is_gone(new_run, reference):
    run = new_run()
    pid = run.start()
    learners = both(run)
    play(run, learners, versions_at_least(learners[0], 3))
    os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    play(run, learners, lambda: (code := run.ended(pid)) is not None and code == 0)
    assert time.monotonic() - began < 14
    assert status(run)["state"] == "stopped"
    before = [run.state(fragment) for fragment in range(3)]
    version = [run.theta().version(fragment) for fragment in range(3)]
    saved = load_file(checkpoints(run.dir.syncer_checkpoints)[-1] / "theta.safetensors")
    assert {name: tuple(t.shape) for name, t in saved.items()} == {spec.name: spec.shape for spec in SPECS}
    run.remove_shared_memory()
    run.start()
    learners = [PlayedLearner(run, "a", incarnation=2), PlayedLearner(run, "b", incarnation=2)]
    learners[0].adopt()
    for fragment in range(3):
        assert torch.equal(run.history[fragment, version[fragment] + VERSION_GAP], before[fragment])
    play(run, learners, versions_at_least(learners[0], VERSION_GAP + 5))
    assert_same_history(run.history, reference, gap=VERSION_GAP)


def test_a_damaged_checkpoint_is_passed_over(new_run):
    run = new_run(syncer={"checkpoint_every_s": 0.05, "keep_checkpoints": 2})
    pid = run.start()
    learners = both(run)
    play(run, learners, lambda: len(events(run, "checkpoint")) >= 3)
    run.kill(pid)
    older, newest = checkpoints(run.dir.syncer_checkpoints)[-2:]
    assert len(checkpoints(run.dir.syncer_checkpoints)) <= 3
    data = bytearray((newest / "outer.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "outer.safetensors").write_bytes(data)
    run.remove_shared_memory()
    run.start()
    PlayedLearner(run, "a").adopt()
    assert f"starts from checkpoints/syncer/{older.name}" in run.log()
    assert "outer.safetensors is damaged" in run.log()


def test_killed_while_it_drains_the_next_one_goes_on_draining(new_run):
    run = new_run(
        budget={"tokens": 1000}, syncer={"lease_s": 2.0}
    )  # the next one waits for islands that have ended
    first = run.start(at="box.committed:25")  # 3 initial versions, 21 merges, the first of the last round
    learners = both(run)
    play(run, learners, lambda: run.ended(first) is not None)
    assert [learner.phase for learner in learners] == ["drained", "drained"]
    pid = run.start()
    assert run.wait(pid) == 0
    assert status(run)["state"] == "finished"
    merges = [(r["fragment"], r["version"]) for r in read_metrics(run.dir.metrics) if r["kind"] == "merge"]
    assert len(merges) == len(set(merges))
    ended = status(run)
    assert ended["tokens"] >= 1000, run.log()
    for island in ended[
        "islands"
    ].values():  # the account of the syncer before goes on: every merge took both
        assert (island["merged"], island["missed"]) == (ended["merges"], 0)
