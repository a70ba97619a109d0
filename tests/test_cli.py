"""The command line: help at once, one line for what is wrong, a new file is a new command."""

import argparse
import os
import socket
import subprocess
import sys

import pytest
from recorded_run import new_run
from tiny_run import tiny_run_file

from diloco_ds import cli, commands
from diloco_ds.cli import command_names, main
from diloco_ds.conductor import lock
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.island import launch

HEAVY = ("torch", "deepspeed", "transformers", "datasets", "mpi4py", "wandb", "lm_eval")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["status", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from diloco_ds.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"assert not set({HEAVY!r}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def words_of(name: str) -> list[str]:
    """The command `name` and, where it has parts, each of them: 'bench', 'bench link', ..."""
    parser = cli._parser(name, cli._command(name))
    parts = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return [name, *(f"{name} {part}" for each in parts for part in each.choices)]


ALL_COMMANDS = [words for name in command_names() for words in words_of(name)]


def help_of(words: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ALL_COMMANDS)
def test_every_command_and_part_explains_itself_with_an_example(words, capsys):
    text = help_of(words, capsys)
    assert f"usage: diloco-ds {words}" in text
    assert f"examples:\n  diloco-ds {words}" in text
    examples = text.partition("examples:\n")[2].rstrip("\n").split("\n")
    assert all(line.startswith(f"  diloco-ds {words}") for line in examples)


TELL_NO_FACTS = {"train", "island"}
"""Commands that stay with a run until it ends."""


@pytest.mark.parametrize("words", [each for each in ALL_COMMANDS if each not in TELL_NO_FACTS])
def test_every_command_that_tells_facts_takes_json(words, capsys):
    if len(words_of(words.split()[0])) > 1 and " " not in words:
        return  # its parts do
    assert "--json" in help_of(words, capsys)


def test_the_overview_names_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in command_names():
        assert f"\n  {name} " in text


def test_a_file_is_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "shout.py").write_text(
        '"""Shout a word."""\n'
        'EXAMPLES = "  diloco-ds shout hello"\n'
        "def add_arguments(parser): parser.add_argument('word')\n"
        "def run(arguments): print(arguments.word.upper()); return 7\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert main(["shout", "hello"]) == 7
    assert capsys.readouterr().out == "HELLO\n"
    sys.modules.pop("diloco_ds.commands.shout")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["train"], "train: name a run file, for example launch/quickstart.yaml, or --resume RUN_DIR"),
        (
            ["train", "nowhere.yaml"],
            "nowhere.yaml: the run file cannot be read: No such file or directory",
        ),
        (["train", "--resume", "nowhere"], "nowhere is no run directory: it holds no manifest.json"),
        (["status", "nowhere"], "nowhere is no run directory: it holds no manifest.json"),
        (["stop", "nowhere"], "nowhere is no run directory: it holds no manifest.json"),
        (["report", "nowhere"], "nowhere is no run directory: it holds no manifest.json"),
        (["export", "nowhere", "out"], "nowhere is no run directory: it holds no manifest.json"),
        (
            ["status"],
            "the following arguments are required: RUN_DIR (diloco-ds status --help shows how)",
        ),
        (
            ["status", "x", "--jsno"],
            "unrecognized arguments: --jsno (diloco-ds status --help shows how)",
        ),
        *(
            (
                [*words.split(), flag, given],
                f"argument {flag}: must be {allowed}, not '{given}' (diloco-ds {command} --help shows how)",
            )
            for command, words, flag, given, allowed in [
                ("eval", "eval x", "--limit", "0", "a whole number of 1 or more"),
                ("eval", "eval x", "--batch-size", "0", "a whole number of 1 or more"),
                ("eval", "eval x", "--heldout-tokens", "-5", "a whole number of 1 or more"),
                ("eval", "eval x", "--heldout-tokens", "1e6", "a whole number of 1 or more"),
                ("plan", "plan x.yaml", "--chips", "-3", "a whole number of 1 or more"),
                ("models", "models", "--vocab", "0", "a whole number of 1 or more"),
                ("replay", "replay x", "--explain", "0", "a whole number of 1 or more"),
                ("join", "join x --island c", "--ranks", "0", "a whole number of 1 or more"),
                ("chaos", "chaos x --rate 5", "--minutes", "nan", "a number above 0"),
                ("chaos", "chaos x --rate 5", "--seed", "-1", "a whole number of 0 or more"),
                ("chaos", "chaos x --fault slow", "--factor", "1", "a number above 1"),
                ("chaos", "chaos x --fault hang", "--seconds", "inf", "a number above 0"),
                ("bench link", "bench link", "--repeats", "0", "a whole number of 1 or more"),
                ("drill storm", "drill storm x.yaml", "--rate", "-1", "a number above 0"),
            ]
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("diloco-ds: error: ")
    assert error.endswith(f"{expected}\n")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


BAD_RUNS = [
    ("exchange.qorum=1", "exchange.qorum: unknown key; did you mean 'quorum'?"),
    ("budget.tokens=many", "budget.tokens: must be a whole number, not 'many'"),
    ("exchange.fragments=5", "fragments (5) must not exceed period (4)"),
    ("exchange.quorum=3", "(K = 3) must not exceed the number of islands (M = 2)"),
    ("data.sources.0.files=nowhere.jsonl", "there is no file"),
    ("model.config_file=nowhere.yaml", "there is no file"),
    (
        "model.overrides={vocab_size: 5000}",
        "the model's vocabulary has 5000 entries, the tokenizer's 320",
    ),
    ("model.overrides={hidden_sise: 8}", "no field 'hidden_sise'; did you mean 'hidden_size'?"),
    ("deepspeed.scheduler={type: WarmupLR}", "use trainer.scheduler"),
    ("trainer.scheduler=cosin", "trainer.scheduler 'cosin'"),
    ("exchange.outer.name=SGDD", "SGDD"),
    ("evaluation.tasks=[arc_esay]", "there is no task 'arc_esay' in lm-eval; did you mean 'arc_easy'?"),
    (
        "model.overrides={intermediate_size: 4000000000}",  # too much for any shared memory
        "of shared memory are needed",
    ),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, same_signals):
    """Starts the tiny run with these arguments: the one line with which it is refused, and nothing was made."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    run_file = tiny_run_file(tmp_path / "given")

    def start(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["train", str(run_file), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("diloco-ds: error: ")
        assert error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return start


@pytest.mark.slow
@pytest.mark.parametrize(("override", "expected"), BAD_RUNS)
def test_a_bad_run_is_refused_before_anything_is_there(refused, override, expected):
    assert expected in refused(override)


def test_a_run_directory_that_holds_something_is_refused(refused, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    assert f"--run-dir: {used} is not empty; name another directory" in refused("--run-dir", str(used))
    below = refused("--run-dir", str(used / "notes.txt" / "run"))
    assert f"{used / 'notes.txt'} is no directory" in below


def test_a_run_that_is_conducted_already_is_refused(tmp_path, capsys, same_signals):
    run = new_run(tmp_path)
    run.layout.write_text(balance([TensorSpec("weight", (8,), embedding=False)], 1, 1).to_json())
    held = lock.hold(run)
    before = sorted(tmp_path.rglob("*"))
    try:
        assert main(["train", "--resume", str(run.root)]) == 2
    finally:
        os.close(held)
    error = capsys.readouterr().err
    assert "this run is conducted by another diloco-ds already; see it with `diloco-ds status" in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_host_without_mpirun_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "no mpirun in the Python environment or in PATH: install an MPI" in refused()


def test_a_port_that_is_taken_is_refused(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = f"islands.b.master_port: {port} is in use; choose another, or leave it out"
        assert expected in refused(f"islands.b.master_port={port}")


def test_more_ranks_than_gpus_are_refused(refused, monkeypatch):
    monkeypatch.setattr(launch, "_visible", lambda listed, island: [0, 1, 2])
    expected = "islands.b: 2 ranks from GPU 2 on, but only 3 GPUs are visible; use fewer ranks"
    assert expected in refused("islands.a.ranks=2", "islands.b.ranks=2")


def test_a_reader_that_goes_away_ends_a_command_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "diloco_ds.cli", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
