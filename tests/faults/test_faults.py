"""kill -9 and SIGSTOP on a live run: nobody waits, and what died is back."""

import os
import signal
import time

import pytest
from live_run import assert_no_gap, kill, live_run, normal_step

pytestmark = pytest.mark.slow

SLOW_STEPS = {"gradient_accumulation_steps": 48}
"""Steps of about half a second: a gap in them can be seen beside the noise of a small machine."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two islands that both are merged; it ends only when it is stopped."""
    directory = tmp_path_factory.mktemp("faults")
    settings = {"budget": {"tokens": 10**9}, "deepspeed": SLOW_STEPS, "syncer": {"checkpoint_every_s": 5.0}}
    with live_run(directory, **settings) as run:
        run.train()
        run.until(run.status, "the run directory appears")
        run.until_merged_again("a", "b", since=0.0)
        yield run


def test_with_the_whole_exchange_stopped_the_islands_keep_their_rate(run):
    start = time.time()
    run.until(lambda: len(run.steps("b", since=start)) >= 10, "some usual steps")
    status = run.status()
    stopped = [
        *status.syncer.pids,
        *(pid for island in status.islands for pid in (island.pids.agent, island.pids.proxy)),
    ]
    usual = {name: normal_step(run, name, time.time()) for name in "ab"}
    since = time.time()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.until(lambda: time.time() - since >= 20, "20 seconds")
    finally:
        until = time.time()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    for name in "ab":
        steps = run.steps(name, since, until)
        rate = len(steps) / (until - since)
        assert rate * usual[name] > 0.75, f"{name}: {rate:.2f} steps/s, before {1 / usual[name]:.2f}"
    assert not [record for record in run.records("merge") if since + 1 < record["time"] < until]
    run.until_merged_again("a", "b")


@pytest.mark.parametrize("role", ["proxy", "agent", "syncer"])
def test_killing_a_part_of_the_exchange_stops_no_island_and_it_comes_back(run, role):
    run.until(lambda: run.island("a").pids.agent and run.island("a").pids.proxy, "the link is whole")
    status = run.status()
    victim = status.syncer.pids[0] if role == "syncer" else getattr(status.islands[0].pids, role)
    merges, generation = status.syncer.merges, status.syncer.generation
    since = time.time()
    kill(victim)
    again = run.until_merged_again("a", "b", since=run.until_replaced(role, victim))
    for name in "ab":
        assert_no_gap(run, name, since, again)
    after = run.status().syncer
    assert after.merges >= merges
    assert after.generation == generation + (role == "syncer")
    versions = {}
    for record in run.records("merge"):
        fragment = record["fragment"]
        assert record["version"] == versions.get(fragment, 0) + 1, "a completed merge was lost or made twice"
        versions[fragment] = record["version"]


def test_killing_a_rank_disturbs_nobody_else_and_it_is_merged_again(run):
    before = run.island("a")
    since = time.time()
    kill(before.pids.ranks[0])
    started = run.until(
        lambda: [
            record
            for record in run.records("event", event="started", role="learner", island="a")
            if record["time"] > since
        ],
        "island a starts again",
    )
    again = run.until_merged_again("a", since=started[0]["time"])
    assert_no_gap(run, "b", since, again)
    after = run.island("a")
    assert after.incarnation == before.incarnation + 1
    assert after.step > 0  # its step clock goes on from its checkpoint
    run.until(lambda: run.island("a").step > before.step, "its step clock comes further than ever")


def test_a_second_conductor_is_refused(run):
    done = run.command("train", "--resume", str(run.dir.root))
    assert done.returncode == 2
    assert f"conducted by another diloco-ds already (process {run.conductor.pid})" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_conductor_all_goes_on_and_another_takes_it_over(run):
    before = run.status()
    since = time.time()
    kill(run.conductor.pid)
    run.conductor.wait()
    run.conductor = None
    again = run.until_merged_again("a", "b", since=since)
    for name in "ab":
        assert_no_gap(run, name, since, again)
    assert run.status().state == "running"
    run.resume()
    run.until(lambda: run.status().conductor_pid == run.conductor.pid, "the new conductor is at work")
    run.until_merged_again("a", "b")
    after = run.status()
    assert after.syncer.pids == before.syncer.pids
    assert [island.pids for island in after.islands] == [island.pids for island in before.islands]
    kill(after.islands[1].pids.proxy)  # it watches over what it took over
    replaced = run.until_replaced("proxy", after.islands[1].pids.proxy, "b")
    run.until_merged_again("b", since=replaced)


def test_two_ctrl_c_end_it_at_once_and_leave_nothing(run):
    run.press_ctrl_c()
    run.until(lambda: run.status().state == "stopping", "the first one is taken")
    since = time.monotonic()
    run.press_ctrl_c()
    assert run.end(within_s=20) == 130
    assert time.monotonic() - since < 10
    run.assert_nothing_left()
