"""The two ends of an island's link: what each sends, what it receives, and what it refuses."""

from __future__ import annotations

import dataclasses
import json

from diloco_ds.errors import UserError
from diloco_ds.exchange.box_chain import DestinationChain, SourceChain
from diloco_ds.exchange.channel import Channel
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.fragment_transfer import CHUNK, FragmentReceiver, FragmentSender
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.peer_moments import PeerMoments
from diloco_ds.exchange.replication import Link, LinkIdentity
from diloco_ds.exchange.traffic import Traffic
from diloco_ds.exchange.wire import (
    MomentsHeader,
    OrdersRecord,
    ReportRecord,
    ThetaHeader,
    UpdateHeader,
    WireError,
)


def proxy_link(
    channel: Channel, mailbox: Mailbox, theta: FragmentBox, identity: LinkIdentity, chunk: int = CHUNK
) -> Link:
    """The syncer's end: sends orders, the fragments of `theta` and the moments that a peer gives, receives the
    report, the island's updates and the moments that it gives.

    Of each fragment in `theta`, the syncer's store, only the weights travel: its first numel(p) values, and
    of the mark in its header what an island could give back (returns.py). Other proxies read `theta` too, so
    nothing there is pinned.
    """
    _check_fits(mailbox.outbox, identity)
    if len(theta.numels) != len(identity.numels) or any(
        held < needed for held, needed in zip(theta.numels, identity.numels, strict=True)
    ):
        raise UserError(f"{theta.path}: its fragments are not those of the run's layout; remove it")
    fragments = len(identity.numels)
    traffic = Traffic(moments_from=fragments)
    source = SourceChain([theta, PeerMoments(identity.island, mailbox)])
    return Link(
        channel,
        identity,
        traffic,
        record_out=mailbox.orders,
        record_in=mailbox.report,
        check_record=lambda payload: _check_report(payload, identity),
        sender=FragmentSender(
            channel,
            source,
            _numels(mailbox),
            traffic,
            pin=False,
            header=lambda fragment, meta: _for_the_way(meta) if fragment < fragments else meta,
            chunk=chunk,
        ),
        receiver=FragmentReceiver(
            channel,
            DestinationChain([mailbox.outbox, mailbox.given]),
            traffic,
            check=lambda fragment, meta: (
                _check_update(fragment, meta, identity)
                if fragment < fragments
                else _check_given(meta, identity)
            ),
            urgent=fragments,
            chunk=chunk,
        ),
    )


def agent_link(channel: Channel, mailbox: Mailbox, identity: LinkIdentity, chunk: int = CHUNK) -> Link:
    """The island's end: sends the report, the outbox and the moments that the island gives, of which it is the only
    reader; receives orders, Theta and the moments of a peer.
    """
    if mailbox.inbox is None or mailbox.taken is None:
        raise UserError(f"{mailbox.folder}: this mailbox has no inbox; an island's end needs one")
    _check_fits(mailbox.outbox, identity)
    mailbox.outbox.clear_pins()
    mailbox.given.clear_pins()
    fragments = len(identity.numels)
    traffic = Traffic(moments_from=fragments)
    source = SourceChain([mailbox.outbox, mailbox.given])
    return Link(
        channel,
        identity,
        traffic,
        record_out=mailbox.report,
        record_in=mailbox.orders,
        check_record=_OrdersCheck(identity.run_id),
        sender=FragmentSender(channel, source, _numels(mailbox), traffic, pin=True, chunk=chunk),
        receiver=FragmentReceiver(
            channel,
            DestinationChain([mailbox.inbox, mailbox.taken]),
            traffic,
            check=lambda fragment, meta: (
                _check_run(ThetaHeader.unpack(meta).run_id, identity.run_id)
                if fragment < fragments
                else _check_taken(meta, identity)
            ),
            urgent=fragments,
            chunk=chunk,
        ),
        returner=FragmentSender(channel, mailbox.inbox, identity.numels, traffic, pin=False, chunk=chunk),
    )


def _numels(mailbox: Mailbox) -> tuple[int, ...]:
    """What travels of the fragments, and then of a portion of moments."""
    return (*mailbox.outbox.numels, *mailbox.given.numels)


def _check_fits(outbox: FragmentBox, identity: LinkIdentity) -> None:
    if outbox.numels != identity.numels:
        raise UserError(f"{outbox.path}: its fragments are not those of the run's layout; remove the mailbox")


def _check_run(theirs: str, ours: str) -> None:
    if theirs != ours:
        raise WireError(f"it belongs to run {theirs}, this is run {ours}")


def _check_island(theirs: str, ours: str) -> None:
    if theirs != ours:
        raise WireError(f"it is of island {theirs}, this is the link of {ours}")


def _check_report(payload: bytes, identity: LinkIdentity) -> None:
    record = ReportRecord.unpack(payload)
    _check_run(record.run_id, identity.run_id)
    _check_island(record.report.island, identity.island)
    if record.layout_digest != identity.layout_digest:
        raise WireError(f"a report with layout {record.layout_digest}, the run has {identity.layout_digest}")


def _check_update(fragment: int, meta: bytes, identity: LinkIdentity) -> None:
    header = UpdateHeader.unpack(meta)
    _check_run(header.run_id, identity.run_id)
    _check_island(header.island, identity.island)
    if header.fragment != fragment or header.numel != identity.numels[fragment]:
        raise WireError(
            f"fragment {fragment} has {identity.numels[fragment]} values; "
            f"its header says fragment {header.fragment}, {header.numel} values"
        )


def _check_given(meta: bytes, identity: LinkIdentity) -> None:
    header = MomentsHeader.unpack(meta)
    _check_run(header.run_id, identity.run_id)
    _check_island(header.island, identity.island)


def _check_taken(meta: bytes, identity: LinkIdentity) -> None:
    header = MomentsHeader.unpack(meta)
    _check_run(header.run_id, identity.run_id)
    _check_island(header.to_island, identity.island)


class _OrdersCheck:
    """Refuses orders of another run, and of a syncer that a newer one has replaced."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._generation = 0

    def __call__(self, payload: bytes) -> None:
        orders = OrdersRecord.unpack(payload)
        _check_run(orders.run_id, self._run_id)
        if orders.generation < self._generation:
            raise WireError(f"orders of generation {orders.generation}, the syncer is {self._generation}")
        self._generation = orders.generation


def _for_the_way(meta: bytes) -> bytes:
    """The header with as much of the store's mark as a syncer that has lost its memory needs of it."""
    header = ThetaHeader.unpack(meta)
    mark = json.loads(header.extra)
    extra = json.dumps({"merges": mark["merges"], "tokens": mark["tokens"]}).encode()
    return dataclasses.replace(header, extra=extra).pack()
