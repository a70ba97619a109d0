"""`diloco-ds chaos`, `join` and `leave` on a live run: real faults, nobody waits, the victim is merged again."""

import shutil
import signal
import statistics
import time
from collections import defaultdict

import psutil
import pytest
from failpoints import Failpoints
from live_run import assert_no_gap, live_run, written

from diloco_ds.core.events import GiveBack, Grant, Stop
from diloco_ds.core.tape import Entry, decode_all
from diloco_ds.rundir import SharedMemory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    return Failpoints(tmp_path_factory.mktemp("armed") / "failpoints")


@pytest.fixture(scope="module")
def run(tmp_path_factory, points):
    """Two islands that both are merged, a schedule of faults from the start; it ends only when it is stopped."""
    directory = tmp_path_factory.mktemp("chaos")
    settings = {
        "budget": {"tokens": 10**9},
        "syncer": {"checkpoint_every_s": 3.0},
        # Steps at a pace, as in the fault matrix: the processors are free for what has to start again.
        "trainer": {"warmup_tokens": 1024, "least_step_s": 0.5},
    }
    schedule = directory / "storm.yaml"
    schedule.write_text("faults: [{at_s: 0.5, fault: hang, target: syncer, seconds: 1}]\n")
    with live_run(directory, **settings) as run:
        run.environment = points.environment
        run.train(str(run.run_file), "--chaos", str(schedule))
        run.until(run.status, "the run directory appears")
        run.until_merged_again("a", "b", since=0.0)
        yield run


def chaos(run, *arguments: str) -> tuple[float, float]:
    """Inject a fault and wait until it is over; when it began and ended (epoch seconds)."""
    before = time.time()
    done = run.command("chaos", str(run.dir.root), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    fault = next(record for record in run.records("event", event="fault") if record["time"] > before)
    return fault["time"], time.time()


def taped(run, *kinds):
    """Records of these kinds on the tape: (time on its generation's clock, action)."""
    with run.dir.tape.open("rb") as lines:
        entries = [each for each in decode_all(lines, run.run_id()) if isinstance(each, Entry)]
    return [(entry.at, entry.value) for entry in entries if isinstance(entry.value, kinds)]


def drops(run, kind: str) -> int:
    return written(run, "status/syncer.json")["drops_by_reason"].get(kind, 0)


def test_the_schedule_the_run_was_started_with_is_carried_out(run):
    run.until(lambda: run.records("event", event="chaos_over"), "the fault of the schedule is over")
    (fault,) = run.records("event", event="fault")
    assert (fault["role"], fault["fault"], fault["target"]) == ("chaos", "hang", "syncer")


def test_garbage_is_dropped_and_counted_and_never_merged(run):
    parts = lambda: [part["island"] for record in run.records("merge") for part in record["parts"]]  # noqa: E731
    run.until(lambda: parts().count("a") > 12, "it has sent every fragment twice")
    for what, kind in (("not_finite", "not_finite"), ("outlying", "outlier")):
        for _ in range(10):  # the island's next update may take its place, or its base be long gone
            _, until = chaos(run, "--fault", "garbage", "--target", "a", "--what", what)
            run.until_merged_again("a", since=until)
            if drops(run, kind):
                break
        assert drops(run, kind), f"{what} is dropped"
    norms = [record["norm"] for record in run.records("merge")]
    assert max(norms) < 100 * statistics.median(norms)


def test_a_cut_link_stops_no_island(run):
    since, until = chaos(run, "--fault", "cut", "--target", "a", "--seconds", "3")
    again = run.until_merged_again("a", since=until)
    for name in "ab":
        assert_no_gap(run, name, since, again)


def test_a_slow_island_is_merged_all_the_same_and_slows_nobody_else(run):
    before = run.island("a")
    rank = psutil.Process(before.pids.ranks[0])
    with run.begin(
        "chaos", str(run.dir.root), "--fault", "slow", "--target", "a", "--seconds", "15"
    ) as chaos:
        (fault,) = run.until(lambda: run.records("event", event="fault", fault="slow"), "it is throttled")
        stands = []
        while chaos.poll() is None:
            stands.append(rank.status() == psutil.STATUS_STOPPED)
            time.sleep(0.05)
        assert chaos.returncode == 0
    assert 0.5 < statistics.mean(stands) < 0.95, "it stands three quarters of the time at four times slower"
    until = time.time()
    merges = [record for record in run.records("merge") if fault["time"] < record["time"] < until]
    assert "a" in {part["island"] for record in merges for part in record["parts"]}
    assert_no_gap(run, "b", fault["time"], until)
    run.until_merged_again("a", since=until)
    assert run.island("a").incarnation == before.incarnation, "nobody takes it for hung"


def test_heal_ends_what_chaos_that_was_killed_left_behind(run):
    before = run.island("a")
    ends = [psutil.Process(pid) for pid in (before.pids.agent, before.pids.proxy)]
    still = lambda: [end.status() == psutil.STATUS_STOPPED for end in ends]  # noqa: E731
    since = time.time()
    with run.begin("chaos", str(run.dir.root), "--fault", "cut", "--target", "a", "--seconds", "600") as cut:
        run.until(lambda: all(still()), "its link stands still")
        cut.kill()
    assert all(still()), "nobody else continues it"
    _, until = chaos(run, "--fault", "heal", "--target", "a")
    assert not any(still())
    again = run.until_merged_again("a", since=until)
    after = run.island("a")
    assert (after.pids, after.incarnation) == (before.pids, before.incarnation)
    for name in "ab":
        assert_no_gap(run, name, since, again)


def test_a_full_disk_stops_nothing_and_checkpoints_go_on_afterwards(run):
    """Shared memory is full with it: the syncer cannot record its ledger, and is the same process afterwards."""
    before = run.status()
    incarnations = [island.incarnation for island in before.islands]
    _, until = chaos(run, "--fault", "disk", "--seconds", "7")
    run.until_merged_again("a", "b", since=until)
    told = run.until(lambda: run.records("event", event="ledger_recorded"), "the ledger is on record again")
    assert told[0]["generation"] == before.syncer.generation
    after = run.status()
    assert (after.syncer.pids, after.syncer.generation) == (before.syncer.pids, before.syncer.generation)
    store = SharedMemory(run.run_id()).store
    run.until(lambda: not list(store.glob(".*")), "nothing of the writes that failed is left")
    assert [island.incarnation for island in after.islands] == incarnations
    assert run.records("event", event="metrics_lost"), "a limit that loses no record proves nothing"
    newest = lambda: max(path.stat().st_mtime for path in run.dir.syncer_checkpoints.iterdir())  # noqa: E731
    run.until(lambda: newest() > until, "a checkpoint after it")


def test_an_island_that_is_lost_with_its_host_and_its_disk_comes_back_with_the_moments_of_its_peer(run):
    before = run.island("a")
    sent = lambda: written(run, "status/agent.b.json")["moments_sent"]  # noqa: E731
    sent_before = sent()  # one of the two may have begun with the other's
    since, _ = chaos(run, "--fault", "lose", "--target", "a")
    for checkpoint in run.dir.island_checkpoints("a").glob("i*-s*"):
        shutil.rmtree(checkpoint)
    run.until(lambda: run.island("a").incarnation > before.incarnation, "another incarnation")
    starts = lambda: run.records("event", event="started", role="learner", island="a")  # noqa: E731
    started = run.until(
        lambda: [start for start in starts() if start["incarnation"] > before.incarnation], "it has started"
    )
    again = run.until_merged_again("a", since=started[0]["time"])
    assert_no_gap(run, "b", since, again)
    assert started[0]["reason"].startswith("initial weights, and optimizer moments of b, of ")
    assert started[0]["reason"].endswith(": there is no own checkpoint")
    given = run.records("event", event="moments", island="a", giver="b")
    (told,) = [event for event in given if event["time"] > since]
    assert "holds every fragment" in told["reason"] or "holds all but" in told["reason"]
    run.until(lambda: sent() == sent_before + 4, "a portion for each of its requests is told of", within_s=60)
    assert run.island("a").pids.supervisor != before.pids.supervisor


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chaos", "--fault", "kil"], "chaos: --fault: no fault 'kil'; did you mean 'kill'?"),
        (["chaos", "--fault", "kill", "--target", "x"], "chaos: --fault kill: no island 'x'"),
        (["join", "--island", "a"], "an island a is there already; choose another name"),
        (
            ["join", "--island", "c", "model.checkpoint=other"],
            "model: an island that joins has the run's model",
        ),
        (["leave", "x"], "no island 'x'; there are a, b"),
    ],
)
def test_bad_input_is_one_line(run, arguments, expected):
    name, *rest = arguments
    done = run.command(name, str(run.dir.root), *rest)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert expected in done.stderr
    assert not run.dir.islands.exists()


def test_an_island_joins_and_another_leaves(run, points):
    ranks = {island.pids.ranks[0]: island.name for island in run.status().islands}
    killed = points.arm("learner.giving")
    joined = run.command("join", str(run.dir.root), "--island", "c", "threads_per_rank=1")
    assert joined.returncode == 0, joined.stderr
    run.until_merged_again("c", since=0.0)
    (started,) = run.records("event", event="started", role="learner", island="c")
    dead, giver = [event["giver"] for event in run.records("event", event="moments", island="c")]
    assert ranks[killed.hit()] == dead, "it died while it gave"
    assert f"and optimizer moments of {giver}, " in started["reason"]
    run.until_merged_again("a", "b", since=started["time"])
    first = run.steps("c")[0]
    assert first["step"] > 1, "it takes up the global step"
    assert first["lr"] == pytest.approx(run.steps("b")[-1]["lr"], rel=0.2)

    leaver = run.island("b")
    since = time.time()
    assert run.command("leave", str(run.dir.root), "b").returncode == 0
    run.until(lambda: run.records("event", event="left", island="b"), "b has left")
    last = [record for record in run.records("merge") if record["time"] > since]
    assert "b" in {part["island"] for record in last for part in record["parts"]}, "its last work is merged"
    run.until(lambda: not SharedMemory(run.run_id()).island_end("b").exists(), "its mailbox is removed")
    assert not {*leaver.pids.ranks, leaver.pids.proxy} & {process.pid for process in run.processes()}
    run.until_merged_again("a", "c")
    assert "leaves already, or has left" in run.command("leave", str(run.dir.root), "b").stderr

    syncer = run.status().syncer.pids[0]
    chaos(run, "--fault", "syncer")
    run.until_replaced("syncer", syncer)
    run.until_merged_again("a", "c")
    assert "b" not in {
        part["island"]
        for record in run.records("merge")
        if record["time"] > time.time() - 1
        for part in record["parts"]
    }


def test_two_ctrl_c_end_it_at_once_and_leave_nothing_and_chaos_is_refused(run):
    run.press_ctrl_c()
    run.until(lambda: run.status().state == "stopping", "the first one is taken")
    since = time.monotonic()
    run.press_ctrl_c()
    assert run.end(within_s=20) == 128 + signal.SIGINT
    assert time.monotonic() - since < 10
    run.assert_nothing_left()
    done = run.command("chaos", str(run.dir.root), "--fault", "kill")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the run is stopped; faults need a live run" in done.stderr


def test_after_a_loss_a_leave_a_join_and_two_syncers_the_accounts_of_the_data_balance(run):
    """By the tape: blocks are leased to one island at a time, and what is neither leased nor free is merged."""
    held, free, frontier, lost, stands = {}, set(), 0, defaultdict(int), []
    for at, action in taped(run, Grant, GiveBack):
        if isinstance(action, Grant):
            blocks = set(range(action.start, action.start + action.size))
            for other in held.values():
                assert not other & blocks
            held[action.lease] = blocks
            frontier = max(frontier, *(block + 1 for block in blocks))
            free -= blocks
        else:
            back = set(range(action.start, action.start + action.size))
            held.pop(action.lease)
            free |= back
            lost[action.island, at] += action.trained
        stands.append((at, len(free) - frontier))
    assert {island for island, _ in lost} >= {"a", "b"}
    rotation = (
        run.config.exchange.period * run.records("event", event="started", island="a")[0]["step_tokens"]
    )
    rotation //= run.config.data.sequence_length
    assert max(lost.values()) <= 2 * rotation, "one rotation, and what was on its way"
    ledger = run.status().ledger
    assert ledger.merged + ledger.leased + ledger.free == ledger.epochs * ledger.epoch_blocks
    assert ledger.lost == 0
    assert ledger.merged > 0
    (stopped,) = [at for at, _ in taped(run, Stop)]
    before = [stand for at, stand in stands if at < stopped - 1][-1:]  # the status file is half a second old
    possible = before + [stand for at, stand in stands if at >= stopped - 1]
    assert ledger.free - ledger.epochs * ledger.epoch_blocks in possible
    assert sum(lost.values()) <= ledger.trained_twice - ledger.reserve <= 5 * rotation
    assert run.command("replay", str(run.dir.root)).returncode == 0, "the ledger decides the same again"
