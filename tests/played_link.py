"""Both ends of a link without MPI, played in one process: mailboxes, store, registers, and what they must be in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diloco_ds.core.events import Orders, Report
from diloco_ds.exchange.channel import InProcessChannel
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.link_ends import agent_link, proxy_link
from diloco_ds.exchange.mailbox import META_CAPACITY, Mailbox
from diloco_ds.exchange.replication import LinkIdentity
from diloco_ds.exchange.wire import OrdersRecord, ReportRecord, ThetaHeader, UpdateHeader

NUMELS = (3, 40, 17)
STATE = 5  # values of outer optimizer state behind the weights in the store
CHUNK = 16  # bytes: fragments of 1, 10 and 5 chunks
IDENTITY = LinkIdentity("run", "layout", "a", NUMELS)


def report(step, run_id="run", layout="layout", island="a"):
    zeros = (0,) * len(NUMELS)
    content = Report(island, 1, "running", step, 0, 0.1, zeros, zeros, zeros)
    return ReportRecord(run_id, layout, content, 1.0, 1.0, 0).pack()


def orders(step, run_id="run", generation=1):
    return OrdersRecord(run_id, generation, Orders("run", step, 0, (0,) * len(NUMELS))).pack()


def update_header(fragment, version, run_id="run", island="a", numel=None):
    return UpdateHeader(
        run_id=run_id,
        island=island,
        incarnation=1,
        fragment=fragment,
        round=1,
        base=0,
        steps=1,
        tokens=1,
        update_id=version,
        lease=0,
        cursor=0,
        numel=NUMELS[fragment] if numel is None else numel,
    ).pack()


IN_STORE, ON_THE_WAY = b'{"merges": 3, "tokens": 64, "merged": {"a": 2}}', b'{"merges": 3, "tokens": 64}'
"""The store's mark, and what of it travels."""


def theta_header(version, run_id="run", extra=IN_STORE):
    return ThetaHeader(run_id, 1, version, extra).pack()


class Ends:
    """Both ends of an island's exchange, and a link between them that can be cut and made anew."""

    def __init__(self, root: Path, name: str = "a") -> None:
        self.identity = replace(IDENTITY, island=name)
        self.island = Mailbox.create(root / f"{name}.island", NUMELS, inbox=True)
        self.syncer = Mailbox.create(root / f"{name}.syncer", NUMELS, inbox=False)
        theta = root / "theta"
        numels = [n + STATE for n in NUMELS]
        self.theta = (
            FragmentBox.open(theta) if theta.exists() else FragmentBox.create(theta, numels, META_CAPACITY)
        )
        self.relink()

    def relink(self, proxy_identity=None, agent_identity=None):
        """What a killed link leaves is in the boxes; the new one knows nothing else."""
        proxy_identity, agent_identity = proxy_identity or self.identity, agent_identity or self.identity
        one, other = InProcessChannel.pair()
        self.proxy = proxy_link(one, self.syncer, self.theta, proxy_identity, chunk=CHUNK)
        self.agent = agent_link(other, self.island, agent_identity, chunk=CHUNK)

    def answer(self, fragment, version, meta=None):
        """The learner writes an update; False while the agent has the slot pinned."""
        slot = self.island.outbox.begin(fragment)
        if slot is None:
            return False
        slot.fill_(version)
        self.island.outbox.commit(fragment, version, meta or update_header(fragment, version))
        return True

    def merge(self, fragment, version, meta=None):
        """The syncer commits a new global fragment, and its optimizer state, which stays at home."""
        slot = self.theta.begin(fragment)
        slot[: NUMELS[fragment]] = version
        slot[NUMELS[fragment] :] = -1
        self.theta.commit(fragment, version, meta or theta_header(version))

    def settle(self):
        """Pump both ends until nothing moves any more."""
        for _ in range(100_000):
            if not (self.agent.pump() | self.proxy.pump()):
                return
        raise AssertionError("the link never comes to rest")

    def copies(self):
        """(what is sent, what is received, how many values of a fragment travel) both ways."""
        return ((self.island.outbox, self.syncer.outbox), (self.theta, self.island.inbox))


def assert_equal_ends(ends):
    assert_records_equal(ends)
    for source, copy in ends.copies():
        for fragment, numel in enumerate(NUMELS):
            version = source.version(fragment)
            assert copy.version(fragment) == version
            if version >= 0:
                assert (copy.payload(fragment, version) == source.payload(fragment, version)[:numel]).all()


def assert_records_equal(ends):
    for source, copy in ((ends.island.report, ends.syncer.report), (ends.syncer.orders, ends.island.orders)):
        newest, copied = source.read(), copy.read()
        assert (newest and newest[1]) == (copied and copied[1])
