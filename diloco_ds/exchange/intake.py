"""What comes in from one island: its reports and updates, checked before the core hears of them.

A report or update that is malformed, of another run, layout or incarnation, of a wrong shape or not finite
raises Refusal: it is dropped and counted, nothing else happens. A sound update stays in the mailbox,
pinned, until it is merged, kept or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import ReportRecord, UpdateHeader, WireError
from diloco_ds.rundir import SharedMemory


class Refusal(Exception):
    """Why a report or update is not let in: `kind` is counted, the message says what exactly."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Intake:
    """The mailbox of island `name` at the syncer's end."""

    def __init__(self, name: str, mailbox: Mailbox, run_id: str, layout: FragmentLayout) -> None:
        self.name = name
        self.mailbox = mailbox
        self.report: ReportRecord | None = None
        self._run_id, self._layout_digest, self._experts = run_id, layout.digest, layout.experts
        self._report_sequence = 0
        self._seen = [-1] * len(mailbox.outbox.numels)  # newest version of the outbox that was looked at
        self._headers: dict[int, tuple[int, UpdateHeader]] = {}  # per fragment: version in the outbox, header
        mailbox.outbox.clear_pins()

    def new_report(self) -> ReportRecord | None:
        """The newest report if it was not read before; Refusal if it is unsound."""
        if self.mailbox.report.sequence() == self._report_sequence:
            return None
        newest = self.mailbox.report.read()
        if newest is None or newest[0] == self._report_sequence:
            return None
        self._report_sequence = newest[0]
        self.report = self._checked_report(newest[1])
        return self.report

    def changed_fragments(self) -> Iterator[int]:
        """Fragments whose outbox holds something not looked at yet."""
        outbox = self.mailbox.outbox
        return (fragment for fragment, seen in enumerate(self._seen) if outbox.version(fragment) > seen)

    def header(self, fragment: int) -> UpdateHeader | None:
        """The header of the newest update of `fragment`, whose payload was not taken yet; Refusal if it is unsound.

        None if it cannot be judged yet: it is being replaced, or comes from an incarnation that has not reported.
        """
        version = self.mailbox.outbox.version(fragment)
        known = self._headers.get(fragment)
        if known is None or known[0] != version:
            try:
                header = self._read_header(fragment, version)
            except Refusal:
                self._seen[fragment] = version
                raise
            if header is None:
                return None
            self._headers[fragment] = (version, header)
        return self._of_this_incarnation(fragment)

    def take(self, fragment: int) -> torch.Tensor | None:
        """The payload that belongs to `header`, fp32[numel], pinned; None if a newer update is replacing it."""
        version, _ = self._headers.pop(fragment)
        outbox = self.mailbox.outbox
        if not outbox.pin(fragment, version):
            return None
        self._seen[fragment] = version
        return outbox.payload(fragment, version)

    def skip(self, fragment: int) -> None:
        """Let the update that `header` told of go by."""
        self._seen[fragment] = self._headers.pop(fragment)[0]

    def release(self, fragment: int) -> None:
        """The update of `fragment` is not needed any more: let the island's link write over it."""
        self.mailbox.outbox.unpin(fragment)

    def _checked_report(self, data: bytes) -> ReportRecord:
        try:
            record = ReportRecord.unpack(data)
        except WireError as error:
            raise Refusal("malformed", f"report: {error}") from error
        report = record.report
        self._check_run(record.run_id, report.island)
        if record.layout_digest != self._layout_digest:
            raise Refusal("wrong_layout", f"report: layout {record.layout_digest}, not {self._layout_digest}")
        if len(report.base) != len(self._seen):
            raise Refusal("wrong_shape", f"report: {len(report.base)} fragments, not {len(self._seen)}")
        if self.report is not None and report.incarnation < self.report.report.incarnation:
            raise Refusal("old_incarnation", f"report of incarnation {report.incarnation}")
        return record

    def _of_this_incarnation(self, fragment: int) -> UpdateHeader | None:
        version, header = self._headers[fragment]
        if self.report is None or header.incarnation > self.report.report.incarnation:
            return None
        if header.incarnation < self.report.report.incarnation:
            del self._headers[fragment]
            self._seen[fragment] = version
            raise Refusal("old_incarnation", f"update {header.update_id} of incarnation {header.incarnation}")
        return header

    def _read_header(self, fragment: int, version: int) -> UpdateHeader | None:
        outbox = self.mailbox.outbox
        try:
            meta = outbox.meta(fragment, version)
        except RuntimeError as error:
            raise Refusal("malformed", f"update of fragment {fragment}: {error}") from error
        return None if meta is None else self._checked_header(fragment, meta, outbox.numels[fragment])

    def _checked_header(self, fragment: int, meta: bytes, numel: int) -> UpdateHeader:
        try:
            header = UpdateHeader.unpack(meta)
        except WireError as error:
            raise Refusal("malformed", f"update of fragment {fragment}: {error}") from error
        self._check_run(header.run_id, header.island)
        if (header.fragment, header.numel) != (fragment, numel):
            raise Refusal(
                "wrong_shape",
                f"update {header.update_id}: fragment {header.fragment} of {header.numel} values where fragment {fragment} "
                f"has {numel}",
            )
        told = len(header.expert_tokens)
        if told not in (0, self._experts[fragment]):
            raise Refusal(
                "wrong_shape",
                f"update {header.update_id}: tokens of {told} experts where fragment {fragment} has "
                f"{self._experts[fragment]}",
            )
        if min(header.steps, header.tokens, header.lease, header.cursor, *header.expert_tokens) < 0:
            raise Refusal(
                "malformed",
                f"update {header.update_id}: {header.steps} steps, {header.tokens} tokens, "
                f"{header.cursor} blocks of lease {header.lease}",
            )
        return header

    def _check_run(self, run_id: str, island: str) -> None:
        if run_id != self._run_id:
            raise Refusal("wrong_run", f"from run {run_id}, this is {self._run_id}")
        if island != self.name:
            raise Refusal("wrong_island", f"from island {island} in the mailbox of {self.name}")


def open_intake(island: str, run_id: str, layout: FragmentLayout) -> Intake:
    """The syncer's end of an island's exchange, made where it is not there yet."""
    folder = SharedMemory(run_id).syncer_end(island)
    if folder.exists():
        mailbox = Mailbox.open(folder)
    else:
        mailbox = Mailbox.create(folder, layout.numels, inbox=False, experts=layout.experts)
    return Intake(island, mailbox, run_id, layout)
