"""What the syncer tells of itself: events on change, a record of every merge, counts of drops, the status file."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from statistics import fmean
from typing import Any

import psutil

from diloco_ds.core.events import Merge, Part
from diloco_ds.core.expert_load import expert_load
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.ledger import Accounts
from diloco_ds.core.view import IslandView, View
from diloco_ds.exchange.recovery import Recovery
from diloco_ds.exchange.wire import ReportRecord
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.rundir import RunDir, write_json

log = logging.getLogger(__name__)


class Account:
    """Metrics, log and status of the syncer of `generation`; `target_tokens` is the run's budget."""

    def __init__(self, run: RunDir, generation: int, target_tokens: int, layout: FragmentLayout) -> None:
        self._run, self._generation, self._target_tokens = run, generation, target_tokens
        self._layout = layout
        self._metrics = MetricsFile(run.metrics)
        self._drops: Counter[str] = Counter()
        self._dropped_before: set[tuple[str, str]] = set()
        self._started = psutil.Process().create_time()
        self._status_fails = False
        self.merges = 0
        """Merges since the run began."""
        self._lost: str | None = None

    def tell(self, event: str, reason: str, **fields: Any) -> None:
        """An event of the run, into metrics and log."""
        log.info("%s: %s", event, reason)
        self._metrics.write(
            "event", event=event, role="syncer", reason=reason, generation=self._generation, **fields
        )

    def tell_of_recovery(self, recovery: Recovery) -> None:
        """What did not come back after the syncer's memory was lost; nothing to tell where nothing was lost."""
        self._lost = recovery.lost
        if self._lost is not None:
            self.tell("recovered", self._lost, origins=[asdict(origin) for origin in recovery.origins])

    def drop(self, island: str, kind: str, reason: str) -> None:
        """Something of `island` was not let in. Counted; told the first time of its kind."""
        self._drops[kind] += 1
        if (island, kind) not in self._dropped_before:
            self._dropped_before.add((island, kind))
            self.tell(
                "drop", f"{island}: {reason}; more of this kind ({kind}) are only counted", island=island
            )

    def merged(self, action: Merge, view: View, **measured: float | None) -> None:
        """A merge is committed."""
        self.merges += 1
        loads = {part.update_id: self._expert_load(action.fragment, part) for part in action.parts}
        parts = [
            {
                "island": part.island,
                "steps": part.steps,
                "tokens": part.tokens,
                "weight": part.weight,
                "base": part.base,
                "late": part.late,
                **_expert_load([loads[part.update_id]]),
            }
            for part in action.parts
        ]
        contributors = {part.island for part in action.parts}
        self._metrics.write(
            "merge",
            generation=self._generation,
            fragment=action.fragment,
            round=action.round,
            version=action.version,
            step=action.round,
            global_step=view.global_step,
            tokens=view.merged_tokens,
            alive=sum(island.alive for island in view.islands.values()),
            eligible=len(contributors) + len(action.missed),
            merged=len(contributors),
            token_share=view.merged_tokens / view.trained_tokens if view.trained_tokens else None,
            parts=parts,
            reason=action.reason,
            **_expert_load(loads.values()),
            **measured,
        )

    def _expert_load(self, fragment: int, part: Part) -> float | None:
        return expert_load(self._layout.expert_layers(fragment).values(), part.expert_tokens)

    def write_status(
        self,
        state: str,
        view: View,
        accounts: Accounts,
        reports: dict[str, ReportRecord | None],
        reason: str | None = None,
    ) -> None:
        """Write status/syncer.json; a disk that does not take it is mentioned once."""
        status = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "generation": self._generation,
            "state": state,
            "reason": reason or view.waiting or None,
            "global_step": view.global_step,
            "tokens": view.merged_tokens,
            "target_tokens": self._target_tokens,
            "merges": self.merges,
            "drops": self._drops.total(),
            "drops_by_reason": dict(self._drops),
            "lost": self._lost,
            "ledger": asdict(accounts),
            "islands": {name: _island(island, reports.get(name)) for name, island in view.islands.items()},
        }
        try:
            write_json(self._run.status("syncer"), status)
            self._status_fails = False
        except OSError as error:
            if not self._status_fails:
                log.warning("status not written: %s", error)
            self._status_fails = True

    def close(self) -> None:
        """Close the metrics file."""
        self._metrics.close()


def _expert_load(loads: Iterable[float | None]) -> dict[str, float]:
    """The field, where tokens of experts are counted."""
    known = [load for load in loads if load is not None]
    return {"expert_load": fmean(known)} if known else {}


def _island(view: IslandView, report: ReportRecord | None) -> dict[str, Any]:
    loss = (
        report.loss if report is not None and report.loss == report.loss else None
    )  # nan before the first step
    return {
        "alive": view.alive,
        "phase": view.phase if report is not None else None,
        "incarnation": view.incarnation if report is not None else None,
        "step": view.step,
        "tokens": view.tokens,
        "tokens_per_s": report.tokens_per_s if report is not None and view.alive else 0.0,
        "loss": loss,
        "merged": view.merged,
        "missed": view.missed,
        "eligible": view.eligible,
        "token_share": view.token_share,
        "reason": view.reason,
    }
