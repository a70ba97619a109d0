"""A new run directory is claimed by one run alone, and is whole or not there."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_config, tiny_run_file

from diloco_ds.conductor import prepare
from diloco_ds.errors import UserError


def test_names_are_counted_up_and_nobody_gets_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "big").mkdir(parents=True)
    claimed = []
    threads = [
        threading.Thread(target=lambda: claimed.append(prepare._free("big", ExitStack()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in claimed) == sorted(f"big-{number}" for number in range(2, 10))


@pytest.mark.parametrize("run_dir", [None, Path("runs"), Path("new"), Path("there/new"), Path("a/b/c")])
@pytest.mark.parametrize("before", [[], ["runs"], ["there"], ["new", "a/b/c"], ["a"]])
def test_what_fails_while_the_directory_is_filled_leaves_all_as_it_was(
    tmp_path, monkeypatch, run_dir, before
):
    monkeypatch.chdir(tmp_path)
    for name in before:
        Path(name).mkdir(parents=True)
    was = sorted(tmp_path.rglob("*"))

    def fill_half() -> None:
        with prepare._claimed(run_dir, "big") as run:
            (run.root / "half").write_text("written")
            (run.root / "init" / "deep").mkdir(parents=True)
            raise UserError("no")

    with pytest.raises(UserError, match=r"^no$"):
        fill_half()
    assert sorted(tmp_path.rglob("*")) == was


def test_what_others_put_beside_it_meanwhile_stays(tmp_path):

    def fill_half() -> None:
        with prepare._claimed(tmp_path / "a" / "b", "big"):
            (tmp_path / "a" / "notes.txt").write_text("mine")
            raise UserError("no")

    with pytest.raises(UserError, match=r"^no$"):
        fill_half()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.txt"]


def test_of_two_that_want_the_same_empty_directory_one_gets_it(tmp_path):
    with prepare._claimed(tmp_path, "big") as run:
        with (
            pytest.raises(UserError, match="is being filled by another run"),
            prepare._claimed(tmp_path, "big"),
        ):
            pass
        (run.root / "manifest.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(UserError, match="was taken by another run"), prepare._claimed(tmp_path, "big"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.slow
def test_a_second_run_leaves_the_first_alone_and_has_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path / "given")
    first, second = (prepare.new_run(config, None, ["test"], Console(quiet=True)) for _ in range(2))
    assert (first.root.name, second.root.name) == ("tiny", "tiny-2")
    assert first.run_id() != second.run_id()
    assert first.initial_weights.read_bytes() == second.initial_weights.read_bytes()
    assert first.layout.read_text() == second.layout.read_text()


@pytest.mark.slow
def test_ctrl_c_during_preparation_leaves_nothing(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco_ds.cli", "train", str(tiny_run_file(tmp_path / "given"))],
        cwd=work,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "checking" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "diloco-ds: interrupted\n"
    assert not list(work.iterdir())
