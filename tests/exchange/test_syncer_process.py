"""The syncer as a process of its own: its merges, garbage, tape, full disk, the end, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from syncer_run import (
    SPECS,
    assert_same_history,
    both,
    events,
    learned,
    play,
    status,
    tape,
    versions_at_least,
)

from diloco_ds.core.events import Event
from diloco_ds.core.fragments import TensorSpec
from diloco_ds.exchange.kept_updates import kept_path, load_kept
from diloco_ds.exchange.merging import Merger
from diloco_ds.exchange.syncer_checkpoint import checkpoints
from diloco_ds.exchange.syncer_opening import marks_of, restored_core
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.observe.metrics import read_metrics


def rda(gradients):
    """Two outer gradients of equal weight, in float64, by the formula of App. D.2."""
    norms = [np.linalg.norm(g) for g in gradients]
    direction = sum(g / n for g, n in zip(gradients, norms, strict=True))
    return np.mean(norms) * direction / np.linalg.norm(direction)


def test_merges_are_what_the_formulas_say(new_run):
    run = new_run()
    run.start()
    learners = both(run)
    play(run, learners, versions_at_least(learners[0], 4))
    for fragment in range(run.layout.fragments):
        numel = run.layout.numel(fragment)
        start = run.history[fragment, 0].double().numpy()
        theta, momentum = start[:numel], np.zeros(numel)
        for version in range(4):
            answers = [learned(run, island, fragment, version).double().numpy() for island in "ab"]
            delta = np.zeros(numel)
            for placed in run.layout.tensors_of(fragment):
                span = slice(placed.offset, placed.offset + placed.spec.numel)
                gradients = [theta[span] - answer[span] for answer in answers]
                delta[span] = np.mean(gradients, axis=0) if placed.spec.embedding else rda(gradients)
            momentum = 0.9 * momentum + delta
            theta = theta - 0.7 * (delta + 0.9 * momentum)
            payload = run.history[fragment, version + 1].numpy()
            np.testing.assert_allclose(payload[:numel], theta, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(payload[numel:], momentum, rtol=2e-5, atol=2e-6)
    merges = [r for r in read_metrics(run.dir.metrics) if r["kind"] == "merge"]
    assert {r["fragment"] for r in merges} == {0, 1, 2}
    assert all(r["merged"] == r["eligible"] == r["alive"] == 2 for r in merges)
    assert all(sum(part["weight"] for part in r["parts"]) == pytest.approx(1) for r in merges)
    assert [r["tokens"] for r in merges[:3]] == [2 * 64 // 3, 2 * 128 // 3, 128]
    assert next(tape(run))[0] == "Header"
    kinds = {kind for kind, _, _ in tape(run)}
    assert {"Joined", "Report", "Answer", "Want", "Merge", "Merged", "Membership"} <= kinds


EVENTS = {kind.__name__ for kind in get_args(Event)}


@pytest.mark.slow
def test_garbage_is_dropped_and_counted_and_nothing_else_happens(new_run, reference):
    run = new_run(
        exchange={"merge": {"outlier_factor": 50.0}}, syncer={"lease_s": 2.0}
    )  # some rounds have no answer
    run.start()
    learners = both(run)
    a = learners[0]
    play(run, learners, versions_at_least(a, 6))

    def drops(kind):
        return status(run).get("drops_by_reason", {}).get(kind, 0)

    def garbage(kind, write):
        before = drops(kind)
        write()
        play(run, [], lambda: drops(kind) > before)

    numel = run.layout.numel(1)
    fine = learned(run, "a", 1, a.base[1])
    nan = fine.clone()
    nan[numel // 2] = float("nan")
    garbage("not_finite", lambda: a.answer(1, 1, values=nan))
    garbage("outlier", lambda: a.answer(1, 1, values=fine + 1e4))
    garbage("wrong_run", lambda: a.answer(1, 1, run_id="another"))
    garbage("wrong_island", lambda: a.answer(1, 1, island="b"))
    garbage("wrong_shape", lambda: a.answer(1, 1, numel=numel + 1))
    garbage("wrong_shape", lambda: a.answer(1, 1, fragment=0))
    garbage("wrong_shape", lambda: a.answer(1, 1, expert_tokens=(1, 2)))  # there are no experts
    garbage("old_incarnation", lambda: a.answer(1, 1, incarnation=0))
    garbage("malformed", lambda: a.put(1, fine, b"no header at all"))
    garbage("malformed", lambda: a.mailbox.report.write(b"no report at all"))
    garbage("not_admitted", lambda: a.answer(1, 1, base=a.base[1] - 1))  # its work on that version is merged
    garbage("not_admitted", lambda: a.answer(1, 1, base=a.base[1] + 7))
    told = [event["reason"] for event in events(run, "drop")]
    assert sum("(wrong_shape)" in reason for reason in told) == 1
    play(run, learners, versions_at_least(a, 8))
    assert_same_history(run.history, reference)


@pytest.mark.parametrize("anchor", ["global", "base"])
def test_a_late_answer_is_merged_in_the_fragments_next_round(new_run, anchor):
    """Quorum 1 without grace: b is asked, answers after the merge, and is in the next one."""
    exchange = {"quorum": 1, "merge": {"anchor": anchor}}
    run = new_run(exchange=exchange, syncer={"keep_updates": True, "lease_s": 60.0})
    run.start()
    a, b = learners = both(run)
    for learner in learners:
        play(run, [], lambda: learner.adopt() or min(learner.base) == 0)  # noqa: B023
    b.report()
    play(run, [], lambda: status(run).get("islands", {}).get("b", {}).get("alive", False))
    a.clock = b.clock = 1
    a.report()
    play(run, [], lambda: 1 in b.orders.want and 1 in a.orders.want)
    fragment = b.orders.want.index(1)
    a.answer(fragment, 1)
    a.answered[fragment] = 1
    play(run, [], lambda: run.theta().version(fragment) == 1)
    b.answer(fragment, 1)
    play(run, [], lambda: sum(kind == "Keep" for kind, _, _ in tape(run)) == 1)
    play(run, [a], lambda: run.theta().version(fragment) == 2)
    merge = [value for kind, value, _ in tape(run) if kind == "Merge" and value.fragment == fragment][1]
    assert [(part.island, part.base, part.late) for part in merge.parts] == [("a", 1, False), ("b", 0, True)]
    of_a, of_b = load_kept(run.dir, merge)
    assert torch.equal(of_a.values, learned(run, "a", fragment, 1))
    values = learned(run, "b", fragment, 0)
    start = run.history[fragment, 0][: run.layout.numel(fragment)]
    assert torch.equal(of_b.values, start - values if anchor == "base" else values)
    assert (of_a.is_gradient, of_b.is_gradient) == (False, anchor == "base")


def test_the_tape_and_kept_updates_give_the_same_weights_again(new_run):
    """What replay does: the core restored from the tape's header decides the same, and the same code merges."""
    run = new_run(syncer={"keep_updates": True})
    first = run.start(at="store.before_commit:8")
    learners = both(run)
    play(run, learners, lambda: run.ended(first) is not None)
    pid = run.start()
    play(run, learners, versions_at_least(learners[0], 5))
    run.kill(pid)
    merger = Merger(run.config, run.layout)
    state, compared, killed_before = {}, 0, None
    for kind, value, at in tape(run):
        if kind == "Header":
            core = restored_core(run.config, run.layout, read_manifest(run.dir.root), value.state)
            marks, expected, killed_before = marks_of(value.state), [], None
            continue
        if kind in EVENTS:
            assert not expected, "the tape lacks actions that the core decides"
            assert killed_before is None, "only a syncer's last decision may not have been carried out"
            expected = core.step(value, at)
            continue
        assert value == expected.pop(0)
        if kind == "Merge" and not kept_path(run.dir, value).exists():
            killed_before = value
        elif kind == "Merge":
            p, numel = value.fragment, run.layout.numel(value.fragment)
            old = state.get((p, value.version - 1), run.history[p, value.version - 1])
            new = torch.empty_like(old)
            delta = merger.outer_gradient(value, load_kept(run.dir, value), old[:numel])
            momentum = {"momentum_buffer": old[numel:]}
            marks[p], _ = merger.outer_step(
                value,
                delta,
                (old[:numel], momentum),
                marks[p],
                (new[:numel], {"momentum_buffer": new[numel:]}),
            )
            state[p, value.version] = new
            if (p, value.version) in run.history:
                assert torch.equal(new, run.history[p, value.version])
                compared += 1
    assert compared >= 15


def test_a_second_syncer_is_refused(new_run):
    run = new_run()
    first = run.start()
    learners = both(run)
    play(run, learners, versions_at_least(learners[0], 1))
    os.kill(first, signal.SIGSTOP)  # it might come back: still nobody may take over
    second = subprocess.run(
        [sys.executable, "-m", "diloco_ds.exchange.syncer_process", str(run.dir.root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    os.kill(first, signal.SIGCONT)
    assert second.returncode == 2
    assert "already advances this run" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    play(run, learners, versions_at_least(learners[0], 3))


def test_an_old_syncer_writes_nothing_more(new_run):
    """Where locks do not hold (some network file systems) the generation stops the older one."""
    run = new_run()
    pid = run.start()
    learners = both(run)
    play(run, learners, versions_at_least(learners[0], 1))
    with (run.dir.root / "syncer.generation").open("r+b") as newest:
        newest.write(b"%020d\n" % 99)  # as a syncer writes it: in place, at once
    version = [run.theta().version(fragment) for fragment in range(3)]
    codes = []
    play(run, learners, lambda: codes.append(run.ended(pid)) or codes[-1] is not None)
    assert codes[-1] == 2
    assert "generation 99 advances this run" in run.log()
    assert max(run.theta().version(f) - version[f] for f in range(3)) <= 1


def test_a_full_disk_pauses_checkpoints_and_nothing_else(new_run):
    big = (*SPECS, TensorSpec("big.weight", (100_000,), False))
    run = new_run(specs=big, syncer={"checkpoint_every_s": 0.1})
    pid = run.start()
    learners = both(run)
    limit = 250_000  # bytes a file may have: too few for a checkpoint, enough for logs
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    saved = len(checkpoints(run.dir.syncer_checkpoints))
    play(run, learners, lambda: any("checkpoint not written" in e["reason"] for e in events(run, "warning")))
    version = min(learners[0].base)
    play(run, learners, versions_at_least(learners[0], version + 2))
    assert len(checkpoints(run.dir.syncer_checkpoints)) <= saved + 1
    assert len(events(run, "warning")) == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    before = len(events(run, "checkpoint"))
    play(run, learners, lambda: len(events(run, "checkpoint")) > before)


def test_the_run_drains_at_its_budget_and_finishes(new_run):
    run = new_run(budget={"tokens": 4000}, evaluation={"every_tokens": 300})
    pid = run.start()
    learners = both(run)
    codes = []

    play(run, learners, lambda: codes.append(run.ended(pid)) or codes[-1] is not None)
    assert codes[-1] == 0
    assert status(run)["state"] == "finished"
    assert status(run)["tokens"] >= 3600
    assert len(events(run, "snapshot")) == len(list(run.dir.snapshots.iterdir())) >= 2
    for snapshot in run.dir.snapshots.iterdir():
        assert json.loads((snapshot / "state.json").read_text())["tokens"] == int(snapshot.name)
    newest = checkpoints(run.dir.syncer_checkpoints)[-1]
    saved = load_file(newest / "theta.safetensors")
    for placed in run.layout.tensors:
        span = run.state(placed.fragment)[placed.offset : placed.offset + placed.spec.numel]
        assert torch.equal(saved[placed.spec.name].reshape(-1), span)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda run: run.dir.manifest.unlink(), "manifest.json"),
        (lambda run: run.dir.initial_weights.write_bytes(b"changed"), "initial weights were changed"),
        (lambda run: run.dir.layout.write_text("{}"), "not a fragment layout"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_exit_code_2(new_run, spoil, line):
    run = new_run()
    spoil(run)
    assert run.wait(run.start()) == 2
    assert line in run.log().strip().splitlines()[-1]
