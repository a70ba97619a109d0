"""The link's benchmark runs, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import pytest

from diloco_ds.bench import link
from diloco_ds.cli import main
from diloco_ds.rundir import SharedMemory


@pytest.mark.slow
def test_measures_each_size_both_ways(capsys):
    assert main(["bench", "link", "--mb", "1", "5", "--repeats", "2", "--json"]) == 0
    speeds = json.loads(capsys.readouterr().out)["speeds"]
    assert [speed["fragment_mb"] for speed in speeds] == [1, 5]
    for speed in speeds:
        assert min(speed["up_mb_s"], speed["down_mb_s"], speed["memcpy_mb_s"]) > 1
    assert not SharedMemory(f"bench-link-{os.getpid()}").root.exists()


def test_bad_sizes_are_refused(capsys):
    assert main(["bench", "link", "--mb", "0"]) == 2
    assert "--mb: must be a whole number of 1 or more, not '0'" in capsys.readouterr().err


def test_a_link_that_fails_is_one_line_and_its_log_is_kept(tmp_path, monkeypatch, capsys):
    broken = ([sys.executable, "-c", "print('first'); print('last'); raise SystemExit(3)"], dict(os.environ))
    monkeypatch.setattr(link, "link_command", lambda *_: broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["bench", "link", "--mb", "1", "--repeats", "1"]) == 2
    said = capsys.readouterr().err
    assert "the link failed; its last line: last; all of them: " in said
    assert said.count("\n") == 1
    (kept,) = tmp_path.iterdir()
    assert said.endswith(f"{kept}\n")
    assert kept.read_text() == "first\nlast\n"
    assert not SharedMemory(f"bench-link-{os.getpid()}").root.exists()


def test_too_little_shared_memory_is_said_and_nothing_is_left(capsys):
    assert main(["bench", "link", "--mb", str(10**9)]) == 2
    assert "of shared memory are needed" in capsys.readouterr().err
    assert not SharedMemory(f"bench-link-{os.getpid()}").root.exists()
