"""A run of a real syncer process with played learners, killed on the way, and its tape replayed, whole and tampered."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from syncer_run import PlayedLearner, SyncerRun, play, versions_at_least

from diloco_ds import changes
from diloco_ds.cli import main
from diloco_ds.core import tape
from diloco_ds.core.events import Answer, Joined, Merge, Merged, Report
from diloco_ds.errors import UserError
from diloco_ds.exchange.store import Mark
from diloco_ds.exchange.syncer_checkpoint import checkpoints
from diloco_ds.exchange.syncer_opening import restored_core, tape_state
from diloco_ds.exchange.tape_file import TapeFile
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.replay.decisions import Recording
from diloco_ds.replay.verdict import explain, replay
from diloco_ds.rundir import RunDir

SETTINGS = {"syncer": {"keep_updates": True, "checkpoint_every_s": 3600.0, "lease_s": 2.0}}


def both(run):
    return [PlayedLearner(run, "a"), PlayedLearner(run, "b")]


def stop(run, pid):
    """Stop the syncer cleanly: it writes a checkpoint and ends its tape."""
    os.kill(pid, signal.SIGTERM)
    learners = both(run)
    play(run, learners, lambda: run.ended(pid) is not None)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Four generations: killed before a commit, killed after one, gone on from disk with two threads, stopped."""
    run = SyncerRun(tmp_path_factory.mktemp("recorded") / "run", **SETTINGS)
    try:
        for at in ("store.before_commit:6", "store.after_commit:4"):
            pid = run.start(at=at)
            learners = both(run)
            play(run, learners, lambda pid=pid: run.ended(pid) is not None)
        pid = run.start()
        learners = both(run)
        play(run, learners, versions_at_least(learners[0], 6))
        stop(run, pid)
        run.remove_shared_memory()
        changes.record(run.dir, ["syncer.threads=2"], ["diloco-ds", "train", "--resume"])
        pid = run.start()
        learners = both(run)
        play(run, learners, versions_at_least(learners[0], 1_000_000 + 8))
        stop(run, pid)
    finally:
        run.close()
    return run.dir


@pytest.fixture
def copy(recorded, tmp_path):
    """The recorded run, to be tampered with."""
    return RunDir(shutil.copytree(recorded.root, tmp_path / "run"))


def test_decisions_and_weights_of_four_generations_come_out_again(recorded):
    verdict = replay(recorded)
    assert verdict.difference is None
    assert verdict.identical
    assert verdict.generations == 4
    assert verdict.merges >= 24
    assert verdict.events > verdict.merges
    assert verdict.torn is None
    assert (
        verdict.weights.against == f"checkpoints/syncer/{checkpoints(recorded.syncer_checkpoints)[-1].name}"
    )
    assert verdict.weights.fragments == 3


def test_the_weights_of_each_generation_are_summed_by_as_many_threads_as_its_syncer_had(
    recorded, monkeypatch
):
    headers = [each for each in Recording.of(recorded).records() if isinstance(each, tape.Header)]
    assert [header.threads for header in headers] == [1, 1, 1, 2]
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    assert replay(recorded).identical
    assert set_to == [1, 1, 1, 2]


def test_the_command_line(recorded, capsys):
    assert main(["replay", str(recorded.root), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["identical"] is True
    assert value["events"] > value["merges"] > 0
    assert main(["replay", str(recorded.root)]) == 0
    text = capsys.readouterr().out
    assert "decisions: identical" in text
    assert "bit for bit" in text


def test_a_weight_changed_by_one_bit_is_found(copy, capsys):
    path = checkpoints(copy.syncer_checkpoints)[-1] / "theta.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    verdict = replay(copy)
    assert not verdict.identical
    assert len(verdict.weights.differing) == 1
    assert main(["replay", str(copy.root)]) == 1
    assert "weights: NOT those of" in capsys.readouterr().out


def test_a_kept_update_that_was_changed_is_found(copy):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = sorted((copy.root / "updates").iterdir())[0]
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    next(iter(tensors.values())).add_(torch.tensor(1e-3))
    save_file(tensors, path, metadata=metadata)
    assert not replay(copy).identical


def test_an_update_that_was_not_kept_is_named(copy):
    sorted((copy.root / "updates").iterdir())[0].unlink()
    with pytest.raises(UserError, match="version 1 of fragment 0 cannot be recomputed"):
        replay(copy)


def test_without_kept_updates_decisions_alone_are_compared(copy):
    copy.config.write_text(copy.config.read_text().replace("keep_updates: true", "keep_updates: false"))
    verdict = replay(copy)
    assert verdict.identical
    assert verdict.weights is None


def rewritten(run, change):
    """The tape's lines with `change(entry)` in place of every entry, checksums made anew."""
    lines = []
    for record in Recording.of(run).records():
        if isinstance(record, tape.Header):
            lines.append(tape.encode_header(record))
        else:
            lines.append(tape.encode(record.at, change(record.value)))
    run.tape.write_bytes(b"".join(lines))


def test_a_decision_that_is_not_the_cores_is_shown(copy, capsys):
    from dataclasses import replace

    def change(value):
        if isinstance(value, Merge) and value.version == 3:
            parts = (replace(value.parts[0], weight=0.9), *value.parts[1:])
            return replace(value, parts=parts)
        return value

    rewritten(copy, change)
    verdict = replay(copy)
    assert not verdict.identical
    assert "weight=0.9" in verdict.difference
    assert "the core decides Merge" in verdict.difference
    assert main(["replay", str(copy.root)]) == 1
    assert "NOT identical" in capsys.readouterr().out


def test_other_settings_decide_otherwise(copy):
    """The comparison is no comparison of the tape with itself."""
    copy.config.write_text(copy.config.read_text().replace("weights: tokens", "weights: uniform", 1))
    copy.config.write_text(copy.config.read_text().replace("quorum: 2", "quorum: 1"))
    assert replay(copy).difference is not None


def test_a_torn_last_record_is_tolerated(copy):
    whole = copy.tape.read_bytes()
    copy.tape.write_bytes(whole[:-7])
    verdict = replay(copy)
    assert verdict.torn is not None
    assert verdict.difference is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:5], lines[5].replace(b'"at":', b'"at":1'), *lines[6:]], "record 6 at byte"),
        (lambda lines: lines[1:], "a tape begins with a header"),
        (lambda lines: [*lines, lines[0]], "generation 1 follows generation 4"),
    ],
)
def test_a_broken_tape_is_one_line(copy, capsys, damage, message):
    copy.tape.write_bytes(b"".join(damage(copy.tape.read_bytes().splitlines(keepends=True))))
    assert main(["replay", str(copy.root)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def other_header(run, **changes):
    import zlib

    first, *rest = run.tape.read_bytes().splitlines(keepends=True)
    record = json.loads(first)
    del record["crc"]
    text = json.dumps(record | changes, separators=(",", ":"))[:-1].encode()
    line = text + b',"crc":"%08x"}\n' % zlib.crc32(text)
    run.tape.write_bytes(b"".join([line, *rest]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "other"}, "of run other, not of"),
        ({"tape": 1}, "of format 1, this program reads format 4"),
    ],
)
def test_another_run_or_version_is_refused(copy, capsys, changes, message):
    other_header(copy, **changes)
    assert main(["replay", str(copy.root)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_tape_and_no_run_are_refused(copy, tmp_path, capsys):
    copy.tape.unlink()
    assert main(["replay", str(copy.root)]) == 2
    assert "holds no tape" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_a_merge_is_explained(recorded, capsys):
    merge = next(
        record.value
        for record in Recording.of(recorded).records()
        if isinstance(record, tape.Entry) and isinstance(record.value, Merge) and record.value.version == 3
    )
    lines = explain(recorded, merge.round)
    assert f"a round of fragment {merge.fragment}" in lines[0]
    assert any(f"merged as version {merge.version} at" in line for line in lines)
    assert any(line.startswith("  in it: a with weight 0.5000: 2 steps and 64 tokens") for line in lines)
    assert main(["replay", str(recorded.root), "--explain", str(merge.round)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.fixture
def by_hand(tmp_path):
    """A tape written with the state machine alone: b answers the first round too late, and is silent in the next."""
    run = SyncerRun(tmp_path / "run", exchange={"quorum": 1}, syncer={"lease_s": 2.0})
    state = tape_state([Mark(0, 0, 0, 0)] * 3, {})
    core = restored_core(run.config, run.layout, read_manifest(run.dir.root), state)
    header = tape.Header(run.run_id, run.layout.digest, 1, state)
    file = TapeFile(run.dir.tape, header, lambda event, reason: None)

    def take(event, now):
        file.append(now, event, core.step(event, now))

    def report(island, step, base=(0, 0, 0)):
        counts = [step] * 3
        return Report(island, 1, "running", step, 64 * step, 1.0, counts, [64 * n for n in counts], base)

    for island in "ab":
        take(Joined(island), 0.0)
        take(report(island, 0), 0.0)
    take(report("a", 1), 1.0)
    take(Answer("a", 1, 1, 1, 0, 1, 64, 7), 1.5)
    take(Merged(1, 1, 1, 0.01), 1.51)
    take(Answer("b", 1, 1, 1, 0, 1, 64, 8), 2.25)
    take(report("a", 1), 20.0)
    take(report("a", 2), 20.5)
    file.close()
    return run.dir


def test_who_was_not_in_a_merge_and_why(by_hand):
    first, second = explain(by_hand, 1), explain(by_hand, 2)
    assert first[1].startswith("  in it: a with weight 1.0000: 1 steps and 64 tokens on version 0")
    assert first[2].startswith(
        "  not in it: b, asked at 1.000 s, answered 0.750 s after the round was over: "
    )
    assert "kept, on version 0, for the fragment's next merge" in first[2]
    assert "neither merged nor skipped" in second[0]
    assert second[1] == "  not in it: a, asked at 20.500 s, did not answer"
    assert second[2].startswith("  not in it: b was not asked: b is not alive: silent for")


def test_a_step_that_was_never_served(recorded, capsys):
    assert main(["replay", str(recorded.root), "--explain", "99999999"]) == 2
    assert "no round on the tape serves step 99999999" in capsys.readouterr().err
    assert main(["replay", str(recorded.root), "--explain", "0"]) == 2
