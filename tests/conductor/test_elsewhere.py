"""Islands that are started elsewhere: where they say they are, how their links get there, and the Slurm scripts."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from live_run import live_run

from diloco_ds.cli import main
from diloco_ds.conductor import elsewhere
from diloco_ds.observe.status_files import StatusFile, SupervisorFile
from diloco_ds.rundir import RunDir, SharedMemory

SLURM = Path(__file__).parents[2] / "launch" / "slurm"


def test_an_island_says_where_it_is(tmp_path):
    run = RunDir(tmp_path)
    assert elsewhere.host_of(run, "a") is None
    elsewhere.announce(run, "a")
    assert elsewhere.host_of(run, "a") == socket.gethostname()
    elsewhere.announce(run, "a", "10.0.0.7")
    assert elsewhere.host_of(run, "a") == "10.0.0.7"


def test_a_link_goes_from_here_to_there_unless_the_user_names_the_hosts():
    here = socket.gethostname()
    assert elsewhere.link_arguments(["--mca", "x", "y"], "far") == [
        *("--mca", "x", "y"),
        *("--host", f"{here}:1,far:1"),
    ]
    assert elsewhere.link_arguments([], here) == ["--host", f"{here}:2"]
    for own in (["--host", "p:1,q:1"], ["--hostfile=hosts"]):
        assert elsewhere.link_arguments(own, "far") == own


def test_of_a_process_on_another_host_its_own_word_is_believed():
    gone = {"pid": os.getpid(), "started": 0.0}
    assert not StatusFile(**gone).alive
    assert StatusFile(**gone, host="far", state="running").alive
    assert not StatusFile(**gone, host="far", state="stopped").alive
    assert not StatusFile(**gone, host=socket.gethostname(), state="running").alive
    assert SupervisorFile(**gone, host="far", state="running").living(7) == 7
    assert SupervisorFile(**gone, host="far", state="failed").living(7) is None


def test_an_unknown_island_is_refused(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text('{"run_id": "x"}')
    shutil.copy(SLURM.parent / "quickstart.yaml", tmp_path / "config.yaml")
    assert main(["island", str(tmp_path), "c"]) == 2
    assert capsys.readouterr().err.endswith(f"{tmp_path} has no island 'c'; it has a, b\n")
    assert not (tmp_path / "status").exists()


@pytest.mark.slow
def test_the_slurm_jobs_make_a_run(tmp_path):
    """With a stand-in for sbatch that starts the jobs here."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f"#!/usr/bin/env bash\nfor script; do :; done\n"
        f'setsid bash "$script" >>"{tmp_path}/job.${{ISLAND:-syncer}}.txt" 2>&1 </dev/null &\n'
        f'echo $! >"{tmp_path}/job.${{ISLAND:-syncer}}.pid"\n'
    )
    sbatch.chmod(0o755)
    program = tmp_path / "bin" / "diloco-ds"
    program.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m diloco_ds.cli "$@"\n')
    program.chmod(0o755)
    with live_run(tmp_path, budget={"tokens": 40_000}) as run:
        submit = (SLURM / "submit.sh").read_text().replace("$here/../../.venv/bin/diloco-ds", str(program))
        (tmp_path / "submit.sh").write_text(submit.replace("$here/", f"{SLURM}/"))
        subprocess.run(
            ["bash", tmp_path / "submit.sh", run.run_file, run.dir.root, "a", "b"],
            env={
                **os.environ,
                "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
                "OMP_NUM_THREADS": "1",
            },
            cwd=tmp_path,
            check=True,
        )
        run.until(lambda: run.status().state == "finished", "the run is finished")
        run.until(lambda: run.dir.report.exists(), "the report is written")
        run.until(lambda: not SharedMemory(run.run_id()).root.exists(), "every island has cleared up")
        run.until(lambda: not run.processes(), "every process has ended")
        assert {island.state for island in run.status().islands} == {"done"}
        run.assert_nothing_left()
