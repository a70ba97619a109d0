"""What may change at a resume, and where it is written down."""

import pytest
import yaml
from tiny_run import tiny_config

from diloco_ds import changes, membership
from diloco_ds.config_file import save_config
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    save_config(tiny_config(tmp_path / "given"), run.config)
    return run


def after(run, *settings):
    before, config = membership.run_config(run), membership.run_config(run, settings)
    changes.check_changes(before, config)
    return changes.differences(before, config)


def test_the_shape_of_an_island_and_how_it_computes_may_change(run):
    assert after(
        run,
        "islands.a.ranks=2",
        "islands.b.deepspeed.zero_optimization.stage=3",
        "deepspeed.optimizer.type=Adam",
        "trainer.activation_checkpointing=true",
    ) == {
        "islands.a.ranks": (1, 2),
        "islands.b.deepspeed.zero_optimization.stage": (None, 3),
        "deepspeed.optimizer.type": ("AdamW", "Adam"),
        "trainer.activation_checkpointing": (False, True),
    }


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("model.overrides.hidden_size=64", "another model is another run"),
        ("tokenizer.train_vocab=512", "another tokenizer is another run"),
        ("data.sequence_length=32", "other text is another run"),
        ("seed=5", "the order of the text"),
        ("exchange.fragments=2", "its tape is replayed with it"),
        ("exchange.quorum=2", "its tape is replayed with it"),
        ("budget.tokens=5", "its tape is replayed with it"),
        ("syncer.lease_s=5", "its tape is replayed with it"),
        ("trainer.scheduler=linear", "the learning rate's schedule"),
        ("islands.a.name=z", "comes with diloco-ds join"),
    ],
)
def test_what_would_be_another_run_is_refused(run, setting, reason):
    with pytest.raises(UserError, match=reason) as refused:
        after(run, setting)
    assert "\n" not in str(refused.value)


def test_an_island_that_is_not_there_is_refused(run):
    with pytest.raises(UserError, match="has no item 'c'; there are a, b"):
        after(run, "islands.c.ranks=2")


def test_changes_are_kept_beside_the_configuration_and_the_later_one_wins(run):
    written = run.config.read_bytes()
    changes.record(run, ["islands.a.ranks=2", "deepspeed.zero_optimization.stage=2"], ["diloco-ds", "train"])
    changes.record(run, ["islands.a.ranks=3"], ["diloco-ds", "train"])
    config = membership.run_config(run)
    assert config.island("a").ranks == 3
    assert config.deepspeed["zero_optimization"]["stage"] == 2
    assert run.config.read_bytes() == written
    assert sorted(path.name for path in run.changes.iterdir()) == ["0001.yaml", "0002.yaml"]
    assert yaml.safe_load((run.changes / "0001.yaml").read_text())["argv"] == ["diloco-ds", "train"]


def test_an_island_that_joined_can_be_changed_too(run):
    island = membership.run_config(run).island("a").model_copy(update={"name": "c"})
    membership.add(run, membership.Joining(island=island, number=0))
    assert after(run, "islands.c.ranks=2") == {"islands.c.ranks": (1, 2)}
