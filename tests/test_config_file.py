"""Run files: what is read, and the one line for what is wrong."""

from pathlib import Path

import pytest
import yaml
from tiny_run import tiny_run, tiny_run_file

from diloco_ds.chaos.schedule import Fault, Schedule
from diloco_ds.config import Block, RunConfig
from diloco_ds.config_file import load_config, save_config
from diloco_ds.errors import UserError
from diloco_ds.membership import Joining


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tiny_run_file(tmp_path)


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_saved_config_reads_back_equal(run_file, tmp_path):
    config = load_config(run_file)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_overrides_reach_every_depth_and_are_yaml_values(run_file):
    config = load_config(
        run_file,
        [
            "budget.tokens=1e6",
            "islands.b.ranks=2",
            "islands.0.env={OMP_NUM_THREADS: '3'}",
            "deepspeed.zero_optimization.stage=3",
            "deepspeed.activation_checkpointing.cpu_checkpointing=true",
            "deepspeed.optimizer.params.lr=3e-4",
            "evaluation.every_tokens=null",
            "evaluation.tasks=[piqa, copa]",
        ],
    )
    assert config.budget.tokens == 1_000_000
    assert [island.ranks for island in config.islands] == [1, 2]
    assert config.islands[0].env == {"OMP_NUM_THREADS": "3"}
    assert config.deepspeed["zero_optimization"] == {"stage": 3}
    assert config.deepspeed["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert config.deepspeed["optimizer"]["params"]["lr"] == 3e-4
    assert config.evaluation.tasks == ["piqa", "copa"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("exchange.qourum=1", "exchange.qourum: unknown key; did you mean 'quorum'?"),
        ("quorum=1", "quorum: unknown key; did you mean exchange.quorum?"),
        ("budget.tokens=many", "budget.tokens: must be a whole number, not 'many'"),
        ("budget.tokens=1.5", "budget.tokens: must be a whole number, not 1.5"),
        ("budget.tokens=0", "budget.tokens: must be greater than 0, not 0"),
        ("budget=", "budget: must be a block of keys, not None"),
        ("trainer.compile=perhaps", "trainer.compile: must be true or false, not 'perhaps'"),
        ("evaluation.tasks=piqa", "evaluation.tasks: must be a list, not 'piqa'"),
        ("exchange.merge.matrices=median", "exchange.merge.matrices: must be 'rda' or 'mean', not 'median'"),
        (
            "islands.1.name=B 2",
            "islands.1.name: must be 1 to 32 small letters, digits, - and _, the first a letter or digit, not 'B 2'",
        ),
        (
            "islands.b.model={overrides: {vocab_size: 500}}",
            "islands.1.model: unknown key; all islands share the run's model; an island's keys are name, ranks, "
            "deepspeed, master_port, threads_per_rank, env, link_args",
        ),
        (
            "islands.b.tokenizer={train_vocab: 500}",
            "islands.1.tokenizer: unknown key; all islands share the run's tokenizer; an island's keys are name, ranks, "
            "deepspeed, master_port, threads_per_rank, env, link_args",
        ),
        (
            "islands.b.vocab_size=500",
            "islands.1.vocab_size: unknown key; the keys here are name, ranks, deepspeed, master_port, "
            "threads_per_rank, env, link_args",
        ),
        ("modle={checkpoint: x}", "modle: unknown key; did you mean 'model'?"),
        ("exchange.tokenizer=3", "exchange.tokenizer: unknown key; did you mean tokenizer?"),
        ("data.sources=[]", "data.sources: must have at least 1 item, not []"),
        ("islands.c.ranks=2", "islands: has no item 'c'; there are a, b"),
        ("islands.2.ranks=2", "islands: has no item 2; they are numbered 0 to 1"),
        ("name.first=x", "name: is the value 'tiny' and has no 'first' in it"),
        ("budget.tokens", "'budget.tokens' is not key=value, for example budget.tokens=1000000"),
        ("name=[a", "name: '[a' is not a YAML value: expected ',' or ']', but got '<stream end>'"),
        ("data.sources.0.text_field=3", "data.sources.0.text_field: must be text; put it in quotes, not 3"),
        ("data.sources.0.text_feild=x", "data.sources.0.text_feild: unknown key; did you mean 'text_field'?"),
    ],
)
def test_what_is_wrong_on_the_command_line(run_file, override, expected):
    assert error_of(run_file, override) == f"command line: {expected}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("exchange.fragments=9", "fragments (9) must not exceed period (4)"),
        ("exchange.overlap=4", "overlap (4) must be less than period (4)"),
        ("exchange.quorum=3", "exchange.quorum (K = 3) must not exceed the number of islands (M = 2)"),
        ("islands.b.name=a", "the name 'a' is used twice"),
        ("model.checkpoint=some/model", "model: give exactly one of config_file and checkpoint"),
        ("exchange.adoption.how=none", "none is for one island only"),
    ],
)
def test_settings_that_do_not_fit_together(run_file, override, expected):
    assert expected in error_of(run_file, override)


def test_an_error_in_the_file_names_its_line(run_file):
    lines = run_file.read_text().splitlines()
    number = lines.index("  fragments: 4")
    lines[number] = "  fragmnets: 4"
    run_file.write_text("\n".join(lines))
    assert (
        error_of(run_file)
        == f"{run_file}:{number + 1}: exchange.fragmnets: unknown key; did you mean 'fragments'?"
    )


def test_a_missing_block_says_what_it_is_for(tmp_path):
    tree = tiny_run(tmp_path)
    del tree["budget"]["tokens"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert "budget.tokens: is missing: Tokens to merge into the global model" in error_of(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nbudget: [1, 2\n", ":3: not valid YAML: "),
        ("name: a\nname: b\n", ":2: name: stands twice, in line 1 already; remove one"),
        ("name: a\n\tbudget: 1\n", ":2: not valid YAML: "),
        ("", "a run file is a YAML mapping"),
        ("- a\n", "a run file is a YAML mapping"),
    ],
)
def test_files_that_are_no_run_files(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = error_of(path)
    assert message.startswith(str(path))
    assert expected in message


def test_a_file_that_is_not_there(tmp_path):
    assert error_of(tmp_path / "no.yaml").endswith(
        "no.yaml: the run file cannot be read: No such file or directory"
    )
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert error_of(tmp_path / "binary.yaml").endswith("not a text file; a run file is YAML in UTF-8")


def test_paths_are_looked_for_beside_the_file_then_here(tmp_path, monkeypatch):
    beside, here = tmp_path / "launch", tmp_path / "here"
    here.mkdir()
    run_file = tiny_run_file(beside)
    monkeypatch.chdir(here)
    (here / "other.yaml").write_text("class: x\n")
    (here / "tasks").mkdir()
    config = load_config(
        run_file,
        [
            "model.config_file=model.yaml",
            "data.sources.0.files=*.jsonl",
            "evaluation.task_dirs=[tasks]",
            "data.cache_dir=cache",
        ],
    )
    assert config.model.config_file == str(beside / "model.yaml")
    assert config.data.sources[0].files == str(beside / "*.jsonl")
    assert config.evaluation.task_dirs == [str(here / "tasks")]
    assert config.data.cache_dir == str(here / "cache")
    assert load_config(run_file, ["model.config_file=other.yaml"]).model.config_file == str(
        here / "other.yaml"
    )
    missing = load_config(run_file, ["model.config_file=nowhere.yaml"])
    assert missing.model.config_file == str(beside / "nowhere.yaml")


def test_hub_names_stay_and_local_directories_become_absolute(run_file, tmp_path):
    (tmp_path / "tokens").mkdir()
    local = load_config(run_file, ["tokenizer={path: tokens}"])
    hub = load_config(run_file, ["tokenizer={path: google/gemma-3-1b}"])
    assert local.tokenizer.path == str(tmp_path / "tokens")
    assert hub.tokenizer.path == "google/gemma-3-1b"


def test_a_file_can_build_on_another(run_file):
    derived = run_file.with_name("derived.yaml")
    derived.write_text("base: run.yaml\nname: derived\nexchange: {overlap: 0}\nislands: [{name: only}]\n")
    config, base = load_config(derived), load_config(run_file)
    assert (config.name, config.exchange.overlap) == ("derived", 0)
    assert config.exchange.fragments == base.exchange.fragments
    assert [island.name for island in config.islands] == ["only"]
    derived.write_text("base: run.yaml\nexchange:\n  qorum: 1\n")
    assert error_of(derived).startswith(f"{derived}:3: exchange.qorum: unknown key")


def test_a_base_must_lie_beside_the_file_and_not_be_built_on_it(run_file):
    derived = run_file.with_name("derived.yaml")
    derived.write_text("base: ../run.yaml\n")
    assert "must be the name of a run file in the same directory" in error_of(derived)
    derived.write_text("base: derived.yaml\n")
    assert "is built on this file itself" in error_of(derived)


@pytest.mark.parametrize("name", ["quickstart", "data_parallel", "two_ranks"])
def test_the_run_files_of_launch_are_valid(name):
    launch = Path(__file__).parent.parent / "launch"
    config = load_config(launch / f"{name}.yaml")
    assert Path(config.model.config_file).is_file()
    assert all(Path(directory).is_dir() for directory in config.evaluation.task_dirs)


def blocks(above: type[Block] = Block) -> list[type[Block]]:
    """All classes of blocks of settings."""
    return [each for block in above.__subclasses__() for each in (block, *blocks(block))]


def test_every_setting_says_what_it_is():
    assert {RunConfig, Schedule, Fault, Joining} <= set(blocks())
    fields = [(block, name, field) for block in blocks() for name, field in block.model_fields.items()]
    silent = [f"{block.__name__}.{name}" for block, name, field in fields if not field.description]
    assert silent == []
