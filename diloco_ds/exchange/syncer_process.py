"""The syncer's process: ``python -m diloco_ds.exchange.syncer_process RUN_DIR``.

SIGTERM or SIGINT stops the run cleanly. Exit codes: 0 finished or stopped, with everything in a checkpoint;
1 the last checkpoint could not be written (the global state is then only in shared memory), or an unexpected
error; 2 something the user can put right, also a second syncer on the same run.
"""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from diloco_ds.config import RunConfig
from diloco_ds.core.tape import Header
from diloco_ds.errors import UserError
from diloco_ds.exchange.intake import open_intake
from diloco_ds.exchange.members import Members
from diloco_ds.exchange.merging import Merger
from diloco_ds.exchange.recovery import Recovery, ask_islands
from diloco_ds.exchange.syncer import LiveSyncer, Parts
from diloco_ds.exchange.syncer_account import Account
from diloco_ds.exchange.syncer_opening import (
    open_store,
    read_config,
    read_layout,
    restored_core,
    tape_state,
)
from diloco_ds.exchange.tape_file import TapeFile
from diloco_ds.exchange.tenure import Superseded, Tenure
from diloco_ds.membership import left
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.rundir import RunDir

log = logging.getLogger("syncer")


def serve(run: RunDir) -> bool:
    """Be the syncer of `run` until it is over; False if the last checkpoint could not be written.

    UserError for what the user can put right, Superseded when a newer syncer has taken the run.
    """
    manifest = read_manifest(run.root)
    config = read_config(run)
    layout = read_layout(run, manifest)
    torch.set_num_threads(config.syncer.threads)
    with Tenure(run.root) as tenure:
        merger = Merger(config, layout)
        recovery = Recovery(
            tenure.generation,
            lambda versions: ask_islands(
                _present(run, config), manifest["run_id"], layout, versions, config.syncer.return_within_s
            ),
        )
        store, origin = open_store(run, manifest, layout, merger.buffers, recovery)
        log.info("generation %d starts from %s", tenure.generation, origin)
        marks = [store.mark(fragment) for fragment in range(layout.fragments)]
        state = tape_state(marks, store.ledger(), recovery.origins)
        header = Header(manifest["run_id"], layout.digest, tenure.generation, state, config.syncer.threads)
        account = Account(run, tenure.generation, config.budget.tokens, layout)
        account.tell_of_recovery(recovery)
        intake_of = partial(open_intake, run_id=manifest["run_id"], layout=layout)
        syncer = LiveSyncer(
            Parts(
                run=run,
                run_id=manifest["run_id"],
                config=config,
                layout=layout,
                tenure=tenure,
                core=restored_core(config, layout, manifest, state),
                merger=merger,
                store=store,
                members=Members(run, intake_of, account.tell),
                tape=TapeFile(run.tape, header, account.tell),
                account=account,
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: syncer.request_stop(signal.Signals(got).name))
        return syncer.run()


def _present(run: RunDir, config: RunConfig) -> list[str]:
    gone = left(run)
    return [island.name for island in config.islands if island.name not in gone]


def main(arguments: list[str]) -> int:
    """Run the syncer; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s syncer %(message)s")
    if len(arguments) != 1:
        print("usage: python -m diloco_ds.exchange.syncer_process RUN_DIR", file=sys.stderr)
        return 2
    try:
        saved = serve(RunDir(Path(arguments[0])))
    except (UserError, Superseded) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if saved else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
