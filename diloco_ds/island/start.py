"""What a learner starts from: the run directory, the initial weights, and on top of them its own last
checkpoint; without one, the optimizer's moments of a peer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.portions import Portions
from diloco_ds.data.prepared import Prepared
from diloco_ds.errors import UserError
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.island.asking import Asking, take_from_peer
from diloco_ds.island.checkpoints import IslandCheckpoints
from diloco_ds.island.engine import Engine, Loaded
from diloco_ds.island.lead import Identity, Lead
from diloco_ds.island.learner_processes import MARK
from diloco_ds.membership import run_config
from diloco_ds.model.initial import weights_hash
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.rundir import RunDir, SharedMemory


class OpenRun:
    """A run as the learner of one island sees it: the same on all ranks but for `rank`.

    UserError where the directory, the mailbox or the supervisor's mark is not there.
    """

    def __init__(self, root: Path, island: str) -> None:
        self.dir = RunDir(root)
        manifest = read_manifest(root)
        self.config = run_config(self.dir)
        self.layout = FragmentLayout.from_json(self.dir.layout.read_text())
        self.data = Prepared.from_dict(manifest["data"])
        self.weights_sha256: str = manifest["model"]["initial_weights_sha256"]
        run_id = str(manifest["run_id"])
        names = [each.name for each in self.config.islands]
        if island not in names:
            raise UserError(f"{self.dir.config}: no island '{island}'; there are {', '.join(names)}")
        self.identity = Identity(
            run_id, self.layout.digest, island, names.index(island), _incarnation(run_id, island)
        )
        self.mailbox = _mailbox(SharedMemory(run_id).island_end(island))
        self.checkpoints = IslandCheckpoints(
            self.dir.island_checkpoints(island), self.config.syncer.keep_checkpoints
        )
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def initial_weights(self) -> Path:
        """Where the run's initial weights are; on rank 0 UserError unless their hash is the manifest's."""
        if self.rank == 0 and weights_hash(self.dir.model_config) != self.weights_sha256:
            raise UserError(
                f"{self.dir.initial_weights} is not the file this run began with: its sha256 differs from the manifest's"
            )
        return self.dir.model_config


@dataclass(frozen=True)
class Restored:
    """In words: what a learner goes on from, and why moments of its own are not part of it; the latter empty if they are."""

    told: str
    lacks: str = ""


def restore(engine: Engine, lead: Lead | None, checkpoints: IslandCheckpoints) -> Restored:
    """Go on from the newest own checkpoint, else from the initial weights; says which, and why. All ranks
    together.

    Newer global fragments come with the first boundary. The learning rate goes on where an earlier incarnation last
    reported to be, even if its checkpoint is older. Data is leased anew.
    """
    if lead is not None:
        lead.begin_from_initial_weights()
    restored = _restore_checkpoint(engine, lead, checkpoints)
    if lead is not None:
        lead.continue_from_earlier_report()
    return restored


def complete(
    restored: Restored, run: OpenRun, engine: Engine, lead: Lead | None, stopped: Callable[[], bool]
) -> str:
    """Take the moments that were not restored from a peer, if there is one; says what the learner starts with, and why. All
    ranks together; waits for the peer, but not for ever (island/asking.py).
    """
    if not restored.lacks:
        return restored.told
    moments, why = "", "a peer gives only the moments of Adam and its kin"
    patience = run.config.trainer.moments_within_s
    if not patience:
        why = "trainer.moments_within_s is 0"
    elif engine.can_take_moments():
        taken = run.mailbox.taken
        assert taken is not None
        asking = None
        if lead is not None:
            count = Portions(run.layout.numels).count
            asking = Asking(lead, taken, count, patience, engine.can_take_moments, stopped)
        take_from_peer(engine, taken, asking)
        if asking is not None:
            moments, why = asking.told, asking.why_not
    if moments:
        return f"{restored.told}, and {moments}: {restored.lacks}"
    return f"{restored.told}, and fresh optimizer moments: {restored.lacks}; {why}"


def _restore_checkpoint(engine: Engine, lead: Lead | None, checkpoints: IslandCheckpoints) -> Restored:
    newest = checkpoints.newest()
    if newest is None:
        return Restored("initial weights", "there is no own checkpoint")
    try:
        loaded = engine.load(checkpoints.root, newest.tag)
    except UserError as error:  # found before anything was loaded: the engine is as it was
        return Restored("initial weights", str(error))
    except Exception:
        # Half-loaded weights are of no use, and the next start must not meet the same checkpoint again.
        checkpoints.withdraw(newest.tag)
        raise
    if lead is not None:
        lead.restore(loaded.client_state["lead"])
        if loaded.written_by:
            lead.progress.step_time = 0.0  # that of the other shape says nothing
    return Restored(_told(newest.tag, loaded), "; ".join(loaded.missing))


def _told(tag: str, loaded: Loaded) -> str:
    said = f"weights {'' if loaded.missing else 'and optimizer moments '}of its checkpoint {tag}"
    if loaded.written_by:
        said += ", written by " + ", ".join(f"{name} {value}" for name, value in loaded.written_by.items())
    return said


def _mailbox(folder: Path) -> Mailbox:
    try:
        return Mailbox.open(folder)
    except FileNotFoundError:
        raise UserError(f"there is no mailbox in {folder}: the island's supervisor makes it") from None


def _incarnation(run_id: str, island: str) -> int:
    given = os.environ.get(MARK, "")
    if not given.startswith(f"{run_id}/{island}/"):
        raise UserError(
            f"{MARK} is '{given}', not {run_id}/{island}/INCARNATION: start the learner through its supervisor, "
            "python -m diloco_ds.island.supervisor RUN_DIR ISLAND"
        )
    return int(given.rpartition("/")[2])
