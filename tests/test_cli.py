"""The command line: help at once, one line for what is wrong, a new file is a new command."""

import os
import subprocess
import sys

import pytest
from tiny_run import tiny_run_file

from diloco_ds import commands
from diloco_ds.cli import command_names, main

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


@pytest.mark.parametrize("name", command_names())
def test_every_command_explains_itself_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: diloco-ds {name}" in text
    assert f"examples:\n  diloco-ds {name}" in text


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
]


@pytest.mark.slow
@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize(("override", "expected"), BAD_RUNS)
def test_a_bad_run_is_refused_before_anything_is_there(override, expected, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    run_file = tiny_run_file(tmp_path / "given")
    given = sorted(path.name for path in run_file.parent.iterdir())
    assert main(["train", str(run_file), override]) == 2
    error = capsys.readouterr().err
    assert error.startswith("diloco-ds: error: ")
    assert expected in error
    assert error.count("\n") == 1
    assert not list(work.iterdir())
    assert sorted(path.name for path in run_file.parent.iterdir()) == given


def test_a_reader_that_goes_away_ends_a_command_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "diloco_ds.cli", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
