"""A new run directory is claimed by one run alone, and is whole or not there."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from tiny_run import tiny_config, tiny_run_file

from diloco_ds.conductor import prepare
from diloco_ds.errors import UserError


def test_names_are_counted_up_and_nobody_gets_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "big").mkdir(parents=True)
    claimed = []
    threads = [threading.Thread(target=lambda: claimed.append(prepare._claim_free("big"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in claimed) == sorted(f"big-{number}" for number in range(2, 10))


def test_what_fails_while_the_directory_is_filled_leaves_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fill_half() -> None:
        with prepare._claimed(None, "big") as run:
            (run.root / "half").write_text("written")
            raise UserError("no")

    with pytest.raises(UserError):
        fill_half()
    assert not list(tmp_path.iterdir())


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
