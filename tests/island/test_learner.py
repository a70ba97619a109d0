"""Real islands under the real launcher; the test plays the syncer through the mailbox."""

import math
import os
import signal

import pytest
import torch
from island.one_island import OneIsland, alive

from diloco_ds.island.learner_processes import running_incarnations

pytestmark = pytest.mark.slow

STEP_TOKENS = 4 * 64


@pytest.fixture(scope="module")
def island(tmp_path_factory):
    """One rank; the tests below are one story, told in their order."""
    settings = {"trainer": {"checkpoint_every_s": 1.0, "warmup_tokens": 1024}, "budget": {"tokens": 10**7}}
    island = OneIsland(tmp_path_factory.mktemp("one"), **settings)
    try:
        island.supervise()
        island.order(global_step=1, global_tokens=2048)
        island.wait_for(lambda: island.stepping(1))
        yield island
    finally:
        island.clean_up()


def test_it_starts_from_the_initial_weights_and_says_who_it_is(island):
    record = island.report()
    assert record.run_id == island.run_id
    assert record.layout_digest == island.layout.digest
    assert set(record.report.base) == {0}
    status = island.wait_for(lambda: status if (status := island.status())["state"] == "running" else None)
    assert (status["incarnation"], status["restarts"]) == (1, 0)
    assert alive(status["pids"]["launcher"])
    assert [alive(pid) for pid in status["pids"]["ranks"]] == [True]
    why = "there is no own checkpoint; it is the only island"
    assert island.events("started")[0]["reason"] == f"initial weights, and fresh optimizer moments: {why}"


def test_it_answers_a_want_with_its_weights_of_now(island):
    island.order(want={1: 1})
    header, values = island.wait_for(lambda: island.answer(1, 1), 60)
    assert (header.incarnation, header.fragment, header.round, header.base) == (1, 1, 1, 0)
    assert header.steps > 0
    assert header.tokens == header.steps * STEP_TOKENS
    assert (header.lease, header.cursor) == (1, header.steps * 4)
    assert values.isfinite().all()
    change = values - island.initial(1)
    assert 0 < change.abs().mean() < 0.1  # trained, from the initial weights on


def test_the_learning_rate_follows_the_tokens_of_the_whole_run(island):
    island.makes_steps()
    newest = island.steps()[-1]
    assert newest["global_tokens"] == 2048
    expected = 0.5 * (1 + math.cos(math.pi * (max(2048, newest["tokens"]) - 1024) / (10**7 - 1024)))
    assert newest["lr"] == pytest.approx(3e-3 * expected, rel=1e-6)
    island.order(global_tokens=10**7)  # the end of the schedule: from now on the rate is 0
    island.wait_for(lambda: island.steps()[-1]["lr"] == 0, 60)
    island.order(global_tokens=0)  # and it never rises again
    island.makes_steps(5)
    assert island.steps()[-1]["lr"] == 0


def test_it_adopts_what_is_newer_and_answers_with_exactly_that(island):
    tokens_before = island.report().report.tokens
    island.order(global_step=1000)
    for fragment in island.fragments:
        island.put(fragment, 5, island.random(fragment, seed=fragment))
    island.wait_for(lambda: set(island.report().report.base) == {5}, 60)
    report = island.report().report
    assert report.step >= 1000  # the step clock moved up to the global step
    assert all(0 <= tokens <= report.tokens - tokens_before for tokens in report.c_tokens)
    island.makes_steps()
    island.order(want=dict.fromkeys(island.fragments, 1004))
    for fragment in island.fragments:
        header, values = island.wait_for(lambda p=fragment: island.answer(p, 1004), 60)
        assert header.base == 5
        # The rate is 0: after steps on them, the master weights are still those that were adopted.
        assert header.steps > 0
        assert torch.equal(values, island.random(fragment, seed=fragment))


def test_a_slot_that_is_being_read_puts_the_answer_off_and_holds_up_nothing(island):
    outbox = island.mailbox.outbox
    read = outbox.version(0)
    assert outbox.pin(0, read)
    island.order(want={0: 1008})
    island.wait_for(lambda: island.answer(0, 1008), 60)  # into the other slot
    island.order(want={0: 1012})
    island.makes_steps(10)
    assert island.answer(0, 1012) is None
    outbox.unpin(0)
    header, _ = island.wait_for(lambda: island.answer(0, 1012), 60)
    assert header.update_id > read


def test_a_killed_rank_is_started_again_and_goes_on(island):
    island.wait_for(lambda: island.events("checkpoint"), 60)
    island.put(2, 6, island.random(2, seed=66))
    os.kill(island.status()["pids"]["ranks"][0], signal.SIGKILL)
    after = island.wait_for(lambda: island.stepping(2))
    assert "of its checkpoint i00001-" in island.events("started")[1]["reason"]
    assert after.report.lease == 2, "it reads what was leased to its incarnation"
    assert after.lr_tokens == 10**7
    assert after.report.step >= 1000
    assert after.report.base[2] == 6
    island.order(want={2: 1016})
    header, values = island.wait_for(lambda: island.answer(2, 1016), 60)
    assert header.incarnation == 2
    assert torch.equal(values, island.random(2, seed=66))
    status = island.wait_for(lambda: status if (status := island.status())["state"] == "running" else None)
    assert (status["incarnation"], status["restarts"]) == (2, 1)
    assert "a rank is gone without a word" in island.events("learner_restarting")[0]["reason"]


def test_a_new_supervisor_takes_the_running_learner_over(island):
    first = island.supervisors[-1]
    second = island.supervise()
    assert second.wait(60) == 2  # one is enough
    assert "has a supervisor already" in (island.run.root / "supervisor.out").read_text()
    ranks = island.status()["pids"]["ranks"]
    first.kill()
    first.wait()
    island.makes_steps()
    island.supervise()
    island.wait_for(lambda: island.status()["state"] == "running" and island.status()["pid"] != first.pid, 60)
    assert island.status()["pids"]["ranks"] == ranks
    assert island.status()["incarnation"] == 2


def test_a_stop_ends_it_with_a_checkpoint(island):
    supervisor = island.supervisors[-1]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(60) == 0
    assert island.status()["state"] == "stopped"
    assert "wrote a checkpoint" in island.status()["reason"]
    record = island.report()
    assert record.report.phase == "stopped"
    newest = sorted((island.run.island_checkpoints("a")).glob("i00002-*/complete.json"))[-1]
    assert newest.parent.name == f"i00002-s{record.report.step:09d}"
    assert len(list(island.run.island_checkpoints("a").glob("i*"))) == 1 + 2  # and the file `incarnation`


def test_it_goes_on_where_it_stopped_and_drains(island):
    before = island.report()
    trained = island.steps()[-1]["tokens"]
    supervisor = island.supervise()
    island.wait_for(lambda: island.stepping(3))
    first = island.wait_for(lambda: [step for step in island.steps() if step["incarnation"] == 3])[0]
    assert first["step"] == before.report.step + 1
    assert first["tokens"] == trained + STEP_TOKENS > before.report.tokens + STEP_TOKENS, (
        "not only of incarnation 2"
    )
    assert first["lr"] == 0
    assert island.report().report.base == before.report.base
    island.order(phase="drain", want=dict.fromkeys(island.fragments, 2000))
    assert supervisor.wait(60) == 0
    assert island.status()["state"] == "done"
    last = island.report().report
    assert last.phase == "drained"
    for fragment in island.fragments:
        header, values = island.answer(fragment, 2000)
        assert header.steps == last.c_steps[fragment] > 0
        assert torch.equal(values, island.random(fragment, seed=66 if fragment == 2 else fragment))


def test_every_second_of_a_step_is_accounted_for(island):
    for incarnation in (1, 2, 3):
        steps = [step for step in island.steps() if step["incarnation"] == incarnation]
        for step in steps:
            assert sum(step["buckets"].values()) == pytest.approx(step["step_s"], rel=0.02)
        told = sum(step["step_s"] for step in steps[1:])
        assert told == pytest.approx(steps[-1]["time"] - steps[0]["time"], rel=0.02, abs=0.2)


def test_every_step_took_the_next_blocks_of_its_lease(island):
    steps = [step for step in island.steps() if step["incarnation"] == 3]
    last = island.report().report
    assert (last.lease, last.cursor, last.reserve) == (3, 4 * len(steps), 0)


def test_nothing_is_left_behind(island):
    assert island.status()["pids"] == {"launcher": None, "ranks": []}
    assert running_incarnations(island.run_id, "a") == []


def test_two_ranks_answer_and_adopt_as_one(tmp_path):
    settings = {
        "ranks": 2,
        "zero_stage": 2,
        "exchange": {"adoption": {"how": "rebase"}},
        "budget": {"tokens": 4096},
        "trainer": {"warmup_tokens": 0, "checkpoint_every_s": 1000.0},
    }
    island = OneIsland(tmp_path, **settings)
    try:
        supervisor = island.supervise()
        island.order(
            global_tokens=4096, want=dict.fromkeys(island.fragments, 1)
        )  # a rate of 0 from the start
        island.wait_for(lambda: island.stepping(1))
        for fragment in island.fragments:
            header, values = island.wait_for(lambda p=fragment: island.answer(p, 1), 60)
            assert torch.equal(values, island.initial(fragment))
            assert header.tokens == header.steps * 2 * STEP_TOKENS
            island.put(fragment, 1, island.random(fragment, seed=fragment))
        island.wait_for(lambda: set(island.report().report.base) == {1}, 60)
        assert min(island.report().report.c_steps) > 0  # rebase counts the steps since the answer
        island.makes_steps()
        island.order(phase="drain", want=dict.fromkeys(island.fragments, 5))
        assert supervisor.wait(60) == 0
        for fragment in island.fragments:
            header, values = island.answer(fragment, 5)
            assert header.base == 1
            torch.testing.assert_close(values, island.random(fragment, seed=fragment), rtol=0, atol=1e-6)
        assert len(list(island.run.island_checkpoints("a").glob("*/complete.json"))) == 1
        steps = island.steps()
        assert all(sum(step["buckets"].values()) == pytest.approx(step["step_s"], rel=0.02) for step in steps)
    finally:
        island.clean_up()
