"""When checkpoints and snapshots are written: in one background thread, one at a time, so that merging goes on.

A disk that is full or gone costs checkpoints, never training: the failure is told once, and the next due
time tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from diloco_ds.config import RunConfig
from diloco_ds.exchange.store import Store
from diloco_ds.exchange.syncer_checkpoint import Facts, remove_unfinished, save, save_checkpoint
from diloco_ds.rundir import RunDir

Tell = Callable[..., None]
"""`tell(event, reason, **fields)`: an event of the run."""


class Saver:
    """Checkpoints every `syncer.checkpoint_every_s`, snapshots every `evaluation.every_tokens` merged tokens.

    All methods are called from the syncer's one thread; `tell` too.
    """

    def __init__(
        self, run: RunDir, config: RunConfig, store: Store, facts: Callable[[], Facts], tell: Tell
    ) -> None:
        self._run, self._config, self._store = run, config, store
        self._facts, self._tell = facts, tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: tuple[str, Future[str]] | None = None
        self._snapshots_taken = self._snapshots_due(facts().tokens)
        self._next_checkpoint = time.monotonic() + config.syncer.checkpoint_every_s
        self._failing = False
        for directory in (run.syncer_checkpoints, run.snapshots):
            remove_unfinished(directory)

    def poll(self, now: float) -> None:
        """Look after the job in the background and start the next one that is due."""
        if self._running is not None:
            if not self._running[1].done():
                return
            self._collect()
        due = self._snapshots_due(self._facts().tokens)
        if due > self._snapshots_taken:
            self._snapshots_taken = due
            self._start("snapshot")
        elif now >= self._next_checkpoint:
            self._next_checkpoint = now + self._config.syncer.checkpoint_every_s
            self._start("checkpoint")

    def finish(self) -> bool:
        """Wait for the job in the background, then write a last checkpoint; False if the disk did not take it."""
        if self._running is not None:
            self._collect()
        self._start("checkpoint")
        return self._collect()

    def close(self) -> None:
        """End the thread, after the job it is at."""
        self._thread.shutdown(wait=True)

    def _snapshots_due(self, tokens: int) -> int:
        every = self._config.evaluation.every_tokens
        return tokens // every if every else 0

    def _start(self, kind: str) -> None:
        work = self._checkpoint if kind == "checkpoint" else self._snapshot
        self._running = (kind, self._thread.submit(work, self._facts()))

    def _collect(self) -> bool:
        """Wait for the running job and tell how it went."""
        if self._running is None:
            return True
        kind, job = self._running
        self._running = None
        try:
            reason = job.result()
        except OSError as error:
            if not self._failing:
                self._tell("warning", f"{kind} not written ({error}); training goes on, tried again later")
            self._failing = True
            return False
        self._failing = False
        self._tell(kind, reason)
        return True

    def _checkpoint(self, facts: Facts) -> str:
        path = save_checkpoint(
            self._run.syncer_checkpoints, self._store, facts, self._config.syncer.keep_checkpoints
        )
        return f"{path.relative_to(self._run.root)}: {facts.tokens} tokens, global step {facts.global_step}"

    def _snapshot(self, facts: Facts) -> str:
        target = self._run.snapshots / str(facts.tokens)
        if not target.exists():  # an earlier life may have come by the same number of tokens
            save(target, self._store, facts, with_outer=False)
        return f"{target.relative_to(self._run.root)}: {facts.tokens} tokens, global step {facts.global_step}"
