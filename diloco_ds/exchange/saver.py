"""When checkpoints and snapshots are written: in one background thread, one at a time, so that merging goes on.

A disk that is full or gone costs checkpoints, never training: the failure is told once, and the next due
time tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from diloco_ds.config import RunConfig
from diloco_ds.exchange.store import Store
from diloco_ds.exchange.syncer_checkpoint import (
    Facts,
    checkpoints,
    mark_complete,
    remove_unfinished,
    save,
    save_checkpoint,
)
from diloco_ds.exchange.tape_file import TapeFile
from diloco_ds.rundir import RunDir

Tell = Callable[..., None]
"""`tell(event, reason, **fields)`: an event of the run."""


class Saver:
    """Checkpoints every `syncer.checkpoint_every_s`, snapshots every `evaluation.every_tokens` merged tokens.

    All methods are called from the syncer's one thread; `tell` too.
    """

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        store: Store,
        tape: TapeFile,
        facts: Callable[[], Facts],
        tell: Tell,
    ) -> None:
        self._run, self._config, self._store, self._tape = run, config, store, tape
        self._facts, self._tell = facts, tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: tuple[str, Facts, Future[str]] | None = None
        self._snapshots_taken = self._snapshots_due(facts().tokens)
        self._next_checkpoint = time.monotonic() + config.syncer.checkpoint_every_s
        self._saved_merges = -1
        self._failing = False
        for directory in (run.syncer_checkpoints, run.snapshots):
            remove_unfinished(directory)

    def poll(self, now: float) -> None:
        """Look after the job in the background and start the next one that is due."""
        if self._running is not None:
            if not self._running[2].done():
                return
            self._collect()
        due = self._snapshots_due(self._facts().tokens)
        if due > self._snapshots_taken:
            self._snapshots_taken = due
            self._start("snapshot")
        elif now >= self._next_checkpoint:
            self._next_checkpoint = now + self._config.syncer.checkpoint_every_s
            self._start("checkpoint")

    def checkpoint_soon(self) -> None:
        """A checkpoint is due now."""
        self._next_checkpoint = 0.0

    def idle(self) -> bool:
        """Whether nothing is being written or due by `checkpoint_soon`."""
        return self._running is None and self._next_checkpoint > 0.0

    def finish(self) -> bool:
        """Wait for the job in the background, then save what is not in a checkpoint yet; False if that failed."""
        self._collect()
        if self._saved_merges == self._facts().merges:
            try:
                mark_complete(checkpoints(self._run.syncer_checkpoints)[-1])
            except OSError as error:
                self._tell("warning", f"the last checkpoint is not marked as such: {error}")
            return True
        self._start("checkpoint", complete=True)
        self._collect()
        return self._saved_merges == self._facts().merges

    def close(self) -> None:
        """End the thread, after the job it is at."""
        self._thread.shutdown(wait=True)

    def _snapshots_due(self, tokens: int) -> int:
        every = self._config.evaluation.every_tokens
        return tokens // every if every else 0

    def _start(self, kind: str, *, complete: bool = False) -> None:
        work = self._checkpoint if kind == "checkpoint" else self._snapshot
        facts = replace(self._facts(), complete=complete)
        self._running = (kind, facts, self._thread.submit(work, facts))

    def _collect(self) -> None:
        """Wait for the running job, if there is one, and tell how it went."""
        if self._running is None:
            return
        kind, facts, job = self._running
        self._running = None
        try:
            reason = job.result()
        except OSError as error:
            if not self._failing:
                self._tell("warning", f"{kind} not written ({error}); training goes on, tried again later")
            self._failing = True
            return
        self._failing = False
        if kind == "checkpoint":
            self._saved_merges = facts.merges
        self._tell(kind, reason)

    def _checkpoint(self, facts: Facts) -> str:
        self._tape.sync()
        keep = self._config.syncer.keep_checkpoints
        path = save_checkpoint(self._run.syncer_checkpoints, self._store, facts, keep)
        return f"{path.relative_to(self._run.root)}: {facts.tokens} tokens, global step {facts.global_step}"

    def _snapshot(self, facts: Facts) -> str:
        target = self._run.snapshots / str(facts.tokens)
        if not target.exists():  # an earlier life may have come by the same number of tokens
            save(target, self._store, facts, with_outer=False)
        return f"{target.relative_to(self._run.root)}: {facts.tokens} tokens, global step {facts.global_step}"
