"""kill -9 and SIGSTOP of every part of a live run at every moment: nobody waits, what died is back, nothing is lost.

The moments, and which cells do not exist: docs/faults.md, "The matrix". How they are played: fault_play.py.
"""

import json

import pytest
from failpoints import Failpoints
from fault_play import Play
from live_run import assert_no_gap, live_run, normal_step

from diloco_ds.core.returning import VERSION_GAP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MOMENTS = {
    "rank": ("kill", "hang", "writing", "reading", "join", "checkpoint", "stop"),
    "launcher": ("kill", "hang", "join", "stop"),
    "supervisor": ("kill", "hang", "join", "stop"),
    "agent": ("kill", "hang", "writing", "reading", "join", "stop"),
    "proxy": ("kill", "hang", "writing", "reading", "join", "stop"),
    "mpirun": ("kill", "hang", "join", "stop"),
    "syncer": ("kill", "hang", "writing", "reading", "join", "checkpoint", "stop", "lost"),
    "conductor": ("kill", "hang", "join", "stop"),
}


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """The whole matrix, played once."""
    directory = tmp_path_factory.mktemp("matrix")
    settings = {
        "budget": {"tokens": 10**9},
        "syncer": {"checkpoint_every_s": 4.0, "lease_s": 3.0, "keep_updates": True},
        # Steps at a pace: long enough to be told apart, and the processors are free for what has to start again.
        "trainer": {"warmup_tokens": 1024, "checkpoint_every_s": 4.0, "least_step_s": 0.5},
    }
    with live_run(directory, **settings) as run:
        points = Failpoints(directory / "failpoints")
        temporary = directory / "tmp"
        temporary.mkdir()
        run.environment = {**points.environment, "TMPDIR": str(temporary)}
        played = Play(run, points)
        played.play()
        yield played


@pytest.mark.parametrize(
    "cell", [(who, when) for who, moments in MOMENTS.items() for when in moments], ids="-".join
)
def test_nobody_else_waits_and_it_is_merged_again(play, cell):
    fault = play.cells[cell]
    if fault.problem is not None:
        pytest.fail(fault.problem)
    for island in fault.survivors:
        assert_no_gap(play.run, island, fault.since, fault.until)


def test_without_the_whole_exchange_the_islands_keep_their_rate(play):
    run, (since, until) = play.run, play.without_exchange
    for name in "ab":
        usual = normal_step(run, name, since)
        rate = len(run.steps(name, since, until)) / (until - since)
        assert rate * usual > 0.75, f"{name}: {rate:.2f} steps/s, before {1 / usual:.2f}"
    assert not [record for record in run.records("merge") if since < record["time"] < until]


def test_a_second_conductor_is_refused(play):
    done = play.second_conductor
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "conducted by another diloco-ds already" in done.stderr


def test_no_merge_is_lost_or_made_twice(play):
    """Versions rise by one; they go on above a gap where the run went on from disk. A syncer that is killed between a merge
    and its record leaves a merge without one.
    """
    versions, generations = {}, {}
    for record in play.run.records("merge"):
        fragment, version = record["fragment"], record["version"]
        before, missing = versions.get(fragment, 0), generations.get(fragment) != record["generation"]
        assert (
            version - before in ((1, 2) if missing else (1,))
            or version // VERSION_GAP > before // VERSION_GAP
        )
        versions[fragment], generations[fragment] = version, record["generation"]
    assert len(versions) == 4


def test_what_the_syncers_host_took_with_it_is_said(play):
    """Newer weights came back from the islands, without momentum; once, since a clean stop loses nothing."""
    (event,) = play.run.records("event", event="recovered")
    returned = [origin for origin in event["origins"] if origin["island"] is not None]
    assert returned
    assert all(origin["weights"] > origin["outer"] for origin in returned)
    assert f"the weights of {len(returned)} of 4 fragments are newer than the checkpoint" in event["reason"]
    assert play.lost == event["reason"]


def test_weights_and_momentum_are_what_the_tape_says(play):
    done = play.run.command("replay", str(play.run.dir.root), "--json")
    verdict = json.loads(done.stdout)
    assert verdict["identical"], verdict
    assert verdict["weights"]["fragments"] == 4
    assert verdict["weights"]["against"].startswith("checkpoints/syncer/")
    assert verdict["generations"] >= 8


def test_nothing_is_left_over(play):
    assert play.left_behind == []
    root = play.run.dir.root
    partial = [path for path in root.rglob(".*") if path.name.endswith((".partial", ".probe"))]
    assert [str(path.relative_to(root)) for path in partial] == []
    temporary = [path.name for path in (play.run.work / "tmp").iterdir()]
    assert [name for name in temporary if not name.startswith("torchinductor_")] == []  # torch's own cache
