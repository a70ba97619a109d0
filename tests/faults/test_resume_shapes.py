"""A run that is stopped and goes on with islands of other shapes, and one more of them."""

import pytest
import yaml
from live_run import live_run

pytestmark = pytest.mark.slow


def test_a_run_goes_on_with_other_ranks_another_zero_stage_and_one_more_island(tmp_path):
    with live_run(tmp_path, budget={"tokens": 3_000_000}, trainer={"checkpoint_every_s": 1.0}) as run:
        root = str(run.dir.root)
        run.train()
        run.until(
            lambda: (
                {record.get("island") for record in run.records("event", event="checkpoint")} >= {"a", "b"}
            ),
            "both islands have a checkpoint",
        )
        alive = run.command("train", "--resume", root, "islands.a.ranks=2")
        run.press_ctrl_c()
        assert run.end() == 130
        assert alive.returncode == 2
        assert "settings change while it is stopped" in alive.stderr
        written, stopped = run.dir.config.read_bytes(), run.status().tokens

        assert "joins when the run goes on" in run.command("join", root, "--island", "c").stdout
        before = len(run.records("event", event="started"))
        run.train("--resume", root, "islands.a.ranks=2", "islands.b.deepspeed.zero_optimization.stage=3")
        run.until_merged_again("a", "b", "c")

        started = {
            record["island"]: record
            for record in run.records("event", event="started")[before:]
            if record.get("role") == "learner"
        }
        shape = "written by ranks 1, expert_parallel 1, zero_stage 1, precision bfloat16"
        for island in "ab":
            assert started[island]["reason"].startswith("weights and optimizer moments of its checkpoint")
            assert started[island]["reason"].endswith(shape)
        assert started["a"]["ranks"] == 2
        assert "there is no own checkpoint" in started["c"]["reason"]
        assert run.status().tokens > stopped
        assert run.dir.config.read_bytes() == written
        changes = yaml.safe_load((run.dir.changes / "0001.yaml").read_text())
        assert changes["settings"] == ["islands.a.ranks=2", "islands.b.deepspeed.zero_optimization.stage=3"]
        (told,) = run.records("event", event="settings_changed")
        assert "islands.a.ranks: 1 -> 2" in told["reason"]
        run.press_ctrl_c()
        assert run.end() == 130
        run.assert_nothing_left()
