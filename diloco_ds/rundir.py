"""Where everything of a run lies: the run directory on disk and the run's shared memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    OSError if the disk does not take it; the old file is still there then, and nothing else is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of `value` as JSON."""
    write_atomically(path, json.dumps(value, indent=1, default=str) + "\n")


def obstacle(folder: Path) -> str | None:
    """Why the directory `folder` cannot be made, or be written in if it is there, in words; None if it can."""
    wanted = folder.absolute()
    there = next(path for path in (wanted, *wanted.parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    return None


def new_directory(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that does not exist, made; its parent must be there.

    mkdir decides between two that want the same.
    """
    number = 1
    while True:
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def write_once(path: Path, text: str) -> bool:
    """Write `text` to `path`, which must not be there yet, whole or not at all; False if it is there.

    OSError if the disk does not take it; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Nothing is created here but on request."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration (YAML)."""
        return self.root / "config.yaml"

    @property
    def manifest(self) -> Path:
        """Run id, commit, versions, seeds, hashes of initial weights and data (JSON)."""
        return self.root / "manifest.json"

    @property
    def layout(self) -> Path:
        """The fragment layout (JSON, `FragmentLayout.to_json`)."""
        return self.root / "layout.json"

    @property
    def initial_weights(self) -> Path:
        """fp32 safetensors of every travelling tensor, made once."""
        return self.root / "init" / "model.safetensors"

    @property
    def model_config(self) -> Path:
        """The transformers config as a directory (`config.json`)."""
        return self.root / "init"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer (`AutoTokenizer.from_pretrained` directory)."""
        return self.root / "tokenizer"

    @property
    def metrics(self) -> Path:
        """One JSON record a line, appended by every process of the run."""
        return self.root / "metrics.jsonl"

    @property
    def tape(self) -> Path:
        """Every event the syncer acted on."""
        return self.root / "tape.bin"

    @property
    def syncer_checkpoints(self) -> Path:
        """Checkpoints of the global state, one directory each."""
        return self.root / "checkpoints" / "syncer"

    def island_checkpoints(self, island: str) -> Path:
        """Checkpoints of an island, one directory each."""
        return self.root / "checkpoints" / "islands" / island

    @property
    def snapshots(self) -> Path:
        """Global weights waiting for evaluation."""
        return self.root / "snapshots"

    @property
    def evaluations(self) -> Path:
        """Results of evaluations (JSON)."""
        return self.root / "evaluations"

    @property
    def export(self) -> Path:
        """The Hugging Face export of the global weights."""
        return self.root / "hf"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.root / "report.html"

    @property
    def islands(self) -> Path:
        """Which islands have joined, shall leave and have left (membership.py)."""
        return self.root / "islands"

    @property
    def changes(self) -> Path:
        """Settings that were changed at a resume (changes.py)."""
        return self.root / "changes"

    @property
    def chaos(self) -> Path:
        """The schedule of faults of a run that was started with one (YAML)."""
        return self.root / "chaos.yaml"

    def status(self, role: str) -> Path:
        """Status and process ids that the process `role` writes of itself, for example 'syncer' or
        'supervisor.a'.
        """
        return self.root / "status" / f"{role}.json"

    def log(self, role: str) -> Path:
        """Output of the process `role`."""
        return self.root / "logs" / f"{role}.log"

    def run_id(self) -> str:
        """The run's id, from its manifest."""
        return str(json.loads(self.manifest.read_text())["run_id"])


@dataclass(frozen=True)
class SharedMemory:
    """Paths of one run's shared memory on this host."""

    run_id: str

    @property
    def root(self) -> Path:
        """Everything of the run on this host; mode 0700."""
        return Path("/dev/shm") / f"diloco-ds-{os.getuid()}" / self.run_id

    @property
    def store(self) -> Path:
        """The syncer's durable global state."""
        return self.root / "store"

    @property
    def returned(self) -> Path:
        """What islands give back to a syncer that has lost its memory; only while it opens."""
        return self.root / "returned"

    def syncer_end(self, island: str) -> Path:
        """The mailbox of an island at the syncer's end of its link."""
        return self.root / f"{island}.syncer"

    def island_end(self, island: str) -> Path:
        """The mailbox of an island at its own end."""
        return self.root / f"{island}.island"

    def link_scratch(self, island: str) -> Path:
        """What MPI itself keeps for the link of an island; nothing in it matters once the link is dead."""
        return self.root / f"{island}.link"
