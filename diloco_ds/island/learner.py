"""The learner: one rank of an island's DeepSpeed job. Its loop is a batch, a step, a boundary.

    deepspeed --num_gpus N --master_port P --module diloco_ds.program diloco_ds.island.learner RUN_DIR ISLAND

Started and watched by the supervisor (island/supervisor.py). Exit code 0 after it drained or stopped as it
was asked to, 2 where it cannot run as configured.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from diloco_ds.core.events import LearnerPhase
from diloco_ds.core.learner import LearnerClock
from diloco_ds.core.schedule import token_schedule
from diloco_ds.data.shard import BlockOrder
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.island.batches import AHEAD, Batches
from diloco_ds.island.boundary import Boundary, Decision, Then, decode_pieces, encode_pieces
from diloco_ds.island.checkpoints import IslandCheckpoints
from diloco_ds.island.completion import Completion, RankBoard
from diloco_ds.island.engine import Engine
from diloco_ds.island.heartbeat import heartbeat
from diloco_ds.island.lead import WAIT_S, Lead
from diloco_ds.island.pace import PacedBatches
from diloco_ds.island.rank_zero import RankZero, StepTimes
from diloco_ds.island.routing import Routing, RoutingBoard
from diloco_ds.island.saving import Saver
from diloco_ds.island.start import OpenRun, complete, restore
from diloco_ds.island.step_log import StepLog
from diloco_ds.island.timing import Laps
from diloco_ds.island.writing import Writing

LONGEST_SAVE_S = 600.0
"""A save that takes longer is no longer spoken for: the supervisor then counts its silence."""


class StopRequest:
    """Whether somebody asked this process to end (SIGTERM). Ctrl-C is the conductor's business."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _ask(self, _number: int, _frame: object) -> None:
        self.asked = True


class Learner:
    """One rank, ready to train. `zero` is rank 0's part, None on the others."""

    def __init__(
        self,
        run: OpenRun,
        engine: Engine,
        batches: Batches,
        completion: Completion,
        zero: RankZero | None,
        stop: StopRequest,
        routing: Routing | None = None,
    ) -> None:
        assert run.mailbox.inbox is not None
        self._run, self._engine, self._batches, self._zero, self._stop = run, engine, batches, zero, stop
        self._completion = completion
        self._laps = Laps()
        self._boundary = Boundary(
            engine,
            run.mailbox.inbox,
            run.mailbox.outbox,
            run.mailbox.given,
            completion,
            run.config.exchange.adoption,
            self._laps,
            routing,
        )
        self._base_lr, self._lr_factor = _learning_rate(run)
        self._ended = time.perf_counter()
        self._saving = 0.0  # seconds the last checkpoint held the loop up, until they are in a step's record
        self._writing: Writing | None = None  # a checkpoint on its way to disk

    def train(self) -> None:
        """Train until the end is ordered, and end: every answer committed, a checkpoint written, the last
        report made.

        The first boundary, before the first step, adopts what is newer than the weights it began from.
        """
        self._ended = time.perf_counter()
        decision = self._cross()
        while decision.then is Then.STEP:
            decision = self._step(decision)
            if decision.save and decision.then is Then.STEP:
                self._save(decision.step)
        while decision.then is Then.WAIT:
            time.sleep(WAIT_S)
            decision = self._cross()
        self._completion.wait()
        failpoint("learner.ending")
        if decision.save:
            self._save(decision.step)
        if self._writing is not None:
            with self._busy_saving():
                self._finish_saving()
        if self._zero is not None:
            self._zero.end(self._engine.finished_steps(wait=True), decision.then)

    def _step(self, before: Decision) -> Decision:
        """A step with the learning rate of the boundary before it, and the boundary after it."""
        began = time.perf_counter()
        reporting = max(0.0, began - self._ended - self._saving)  # of the step before, after its end
        batch = self._batches.next()
        data = time.perf_counter() - began
        factor = self._lr_factor(before.lr_tokens)
        self._engine.set_lr(factor)
        self._engine.step(batch)
        if self._writing is not None:
            self._writing.check()  # or ranks would train on whose writers wait for a dead one
        results = self._engine.finished_steps()
        if self._zero is not None:
            self._zero.stepped(results)
        decision = self._cross()
        before_it, self._ended = self._ended, time.perf_counter()
        if self._zero is not None:
            exchange = {**self._laps.seconds, "report": reporting}
            times = StepTimes(self._ended - before_it, data, exchange, self._saving)
            self._zero.record(times, decision, self._base_lr * factor, results)
        self._saving = 0.0
        return decision

    def _cross(self) -> Decision:
        """One boundary."""
        self._laps.begin()
        decision, finish = self._zero.decide(self._stop.asked) if self._zero is not None else (None, None)
        self._laps.lap("decide")
        agreed = self._boundary.agree(decision)
        if agreed.read:
            self._batches.read(agreed.read)
        self._laps.lap("agree")
        self._boundary.carry_out(agreed, finish)
        return agreed

    def _save(self, step: int) -> None:
        """Begin a checkpoint at step clock `step`, all ranks together."""
        zero, tag = self._zero, IslandCheckpoints.tag(self._run.identity.incarnation, step)
        began = time.perf_counter()
        with self._busy_saving():
            self._finish_saving()
            self._writing = self._engine.save(
                self._run.checkpoints.root,
                tag,
                zero.state() if zero else {},
                self._run.config.trainer.checkpoint_in_background,
            )
        self._saving = time.perf_counter() - began
        if zero is not None:
            zero.saving(tag, self._saving, self._writing)

    def _finish_saving(self) -> None:
        """Return when the checkpoint before is written, and on rank 0 when it is complete: what completes one removes all
        that is half written. A checkpoint that failed is told of by rank 0's saver.
        """
        if self._writing is not None:
            with contextlib.suppress(OSError):
                self._writing.wait()
        if self._zero is not None:
            self._zero.saver.wait()
        self._writing = None

    def _busy_saving(self) -> contextlib.AbstractContextManager[None]:
        return _spoken_for(self._zero.lead if self._zero else None, "running", LONGEST_SAVE_S)


def learn(run: OpenRun, stop: StopRequest) -> None:
    """Start this rank, go on from where the island was, train to the end, and leave the other ranks."""
    lead = log = None
    if run.rank == 0:
        exchange = run.config.exchange
        clock = LearnerClock(run.layout.fragments, exchange.adoption.how, exchange.merge.late)
        lead = Lead(run.identity, run.mailbox, clock)
        log = StepLog(run.dir.metrics, run.identity.island, run.identity.incarnation)
    board = run.mailbox.folder / "ranks"
    with _spoken_for(lead, "starting"):
        if run.rank == 0:
            RankBoard.renew(board, run.ranks)  # before the ranks meet in Engine.start
            if _counts_experts(run):
                RoutingBoard.renew(_routing_board(run), run.ranks, run.layout.experts)
        engine = _start_engine(run)
        failpoint("learner.starting")
        restored = restore(engine, lead, run.checkpoints)
        if lead is not None:
            _introduce(lead, run, engine)
        outcome = complete(restored, run, engine, lead, lambda: stop.asked)
    zero = _rank_zero(run, engine, lead, log, outcome) if lead and log else None
    with _spoken_for(lead, "starting"):
        batches = _open_batches(run, engine, lead)
    completion = Completion(RankBoard(board), run.rank)
    routing = _routing(run, engine, lead)
    Learner(run, engine, batches, completion, zero, stop, routing).train()
    batches.close()
    completion.close()
    engine.close()


def _start_engine(run: OpenRun) -> Engine:
    identity, config = run.identity, run.config
    deepspeed_config = config.deepspeed_of(identity.island)
    seed = config.seed + 1000 * identity.index
    initial, counts = run.initial_weights(), _counts_experts(run)
    engine = Engine.start(initial, deepspeed_config, config.trainer, run.layout, seed, counts)
    mailbox = run.mailbox
    for box in (mailbox.outbox, mailbox.inbox, mailbox.given, mailbox.taken):
        if box is not None:
            engine.pin(box.address, box.nbytes)
    return engine


def _counts_experts(run: OpenRun) -> bool:
    return run.config.exchange.merge.weights == "expert_tokens"


def _routing_board(run: OpenRun) -> Path:
    return run.mailbox.folder / "routed"


def _routing(run: OpenRun, engine: Engine, lead: Lead | None) -> Routing | None:
    """What the island's answers tell of its experts; None where the merge does not ask."""
    if engine.routed is None:
        return None
    board = RoutingBoard(_routing_board(run), run.layout.experts)
    engine.pin(board.address, board.nbytes)
    routing = Routing(engine.routed, board, engine.host, run.rank)
    if lead is not None:
        lead.routed = routing.told
    return routing


def _introduce(lead: Lead, run: OpenRun, engine: Engine) -> None:
    """With its next report the syncer knows what the island needs and has."""
    step_blocks = engine.world_size * engine.micro_batch * engine.grad_accumulation
    lead.begin_reading(step_blocks, run.data.sequence_length)
    if engine.can_take_moments():  # else there will be none to give either
        lead.giving.own = engine.own_moments


def _rank_zero(run: OpenRun, engine: Engine, lead: Lead, log: StepLog, outcome: str) -> RankZero:
    config = run.config
    log.event("started", outcome, ranks=engine.world_size, step_tokens=lead.step_tokens)
    saver = Saver(run.checkpoints, config.trainer.checkpoint_every_s, sum(run.layout.numels), log)
    return RankZero(lead, log, saver, config.exchange.grace.smoothing)


def _open_batches(run: OpenRun, engine: Engine, lead: Lead | None) -> Batches:
    """All ranks begin to read the first batches; every boundary names a further one."""
    blocks = run.data.open_train()
    order = BlockOrder(len(blocks), run.config.seed)
    sequences = engine.micro_batch * engine.grad_accumulation
    pinned = engine.device.type == "cuda"
    least_step_s = run.config.trainer.least_step_s
    make = partial(PacedBatches, least_step_s) if least_step_s else Batches
    batches = make(blocks, order, engine.rank, engine.world_size, sequences, pinned)
    if lead is not None:
        lead.wait_for_lease()
    for _ in range(AHEAD):
        engine.broadcast_start(encode_pieces(lead.plan_batch() if lead else ()))
        batches.read(decode_pieces(engine.broadcast_wait()))
    return batches


def _learning_rate(run: OpenRun) -> tuple[float, Callable[[int], float]]:
    """The peak learning rate, and its factor over tokens."""
    trainer = run.config.trainer
    base_lr = float(run.config.deepspeed_of(run.identity.island)["optimizer"]["params"]["lr"])
    return base_lr, token_schedule(
        trainer.scheduler,
        trainer.scheduler_args,
        trainer.warmup_tokens,
        run.config.budget.tokens,
        base_lr,
        "trainer.scheduler",
    )


def _spoken_for(
    lead: Lead | None, phase: LearnerPhase, at_most_s: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """While no steps are made, rank 0 writes a report in `phase` every second."""
    if lead is None:
        return contextlib.nullcontext()
    return heartbeat(lambda: lead.report(phase), at_most_s)


def main(arguments: list[str] | None = None) -> int:
    """One rank, from start to end; the exit code."""
    parser = argparse.ArgumentParser(prog="diloco_ds.island.learner", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("island")
    given = parser.parse_args(arguments)
    stop = StopRequest()
    try:
        learn(OpenRun(given.run_dir, given.island), stop)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
