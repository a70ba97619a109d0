"""A ledger with played islands that read what it leases, and a record of what was leased to whom and merged."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from diloco_ds.core import events as ev
from diloco_ds.core.ledger import Ledger
from diloco_ds.core.reading import Reading

FRAGMENTS, ROTATION = 3, 3
"""A step answers one fragment, so that each has its turn once a rotation, and it is merged DELAY steps later."""
DELAY = 2


@dataclass
class Island:
    """A learner that reads what its orders name, and answers fragment after fragment."""

    name: str
    index: int
    step_blocks: int
    incarnation: int = 1
    steps: int = 0
    alive: bool = True
    cut: bool = False
    orders: ev.Orders = field(default_factory=lambda: ev.Orders("run", 0, 0, ()))
    read: list[tuple[int, int]] = field(default_factory=list)
    on_the_way: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self):
        self.reading = Reading(self.incarnation, self.index, self.step_blocks)

    def step(self):
        self.read += self.reading.plan_batch(self.orders)
        self.reading.trained()
        self.steps += 1
        if not self.cut:
            self.on_the_way.append((self.steps + DELAY, self.steps % FRAGMENTS, self.reading.position))

    def restart(self):
        self.incarnation += 1
        self.alive, self.on_the_way = True, []
        self.__post_init__()


class Story:
    """A ledger, its islands, and a record of what was leased to whom and merged."""

    def __init__(self):
        self.ledger = Ledger(FRAGMENTS, ROTATION, 40)
        self.islands = {}
        self.version = 0
        self.held = {}  # by lease number: (island, start, size)
        self.merged_blocks = Counter()
        self.ever_leased = defaultdict(set)  # blocks by island
        self.lost_blocks = 0  # most blocks that the faults can have cost

    def carry_out(self, actions):
        for action in actions:
            if isinstance(action, ev.Grant):
                blocks = range(action.start, action.start + action.size)
                for other, start, size in self.held.values():
                    assert not set(blocks) & set(range(start, start + size)), f"leased to {other} too"
                self.held[action.lease] = (action.island, action.start, action.size)
                self.ever_leased[action.island].update(blocks)
            elif isinstance(action, ev.GiveBack):
                _, start, size = self.held.pop(action.lease)
                assert (action.start + action.size) == start + size
                self._merge(start, action.start)

    def _merge(self, start, end):
        self.merged_blocks.update(range(start, end))

    def hear(self, island):
        if island.cut or not island.alive:
            return
        actions = []
        reading = island.reading
        self.ledger.hear(
            report(
                island.name,
                island.incarnation,
                at=reading.position,
                reserve=reading.reserve,
                step_blocks=island.step_blocks,
            ),
            serve=True,
            actions=actions,
        )
        self.carry_out(actions)

    def tell(self, island):
        if not island.cut:
            reader, leases = self.ledger.leases(island.name)
            island.orders = ev.Orders("run", 0, 0, (), reader, leases)

    def step(self, island):
        if island.alive:
            island.step()
            self.hear(island)
            self.deliver(island)

    def deliver(self, island):
        for due in [each for each in island.on_the_way if each[0] <= island.steps]:
            island.on_the_way.remove(due)
            self.version += 1
            merge(self.ledger, due[1], self.version, **{island.name: due[2]})
        self.drop_merged()

    def drop_merged(self):
        """Leases that are wholly merged are out of the ledger's sight: their blocks are merged."""
        present = {
            lease[0] for holder in self.ledger.state()["holders"].values() for lease in holder["leases"]
        }
        for number in [number for number in self.held if number not in present]:
            _, start, size = self.held.pop(number)
            self._merge(start, start + size)

    def fault(self, island):
        """At most a rotation and what is on its way, with the batch of this moment, was trained on and is not merged."""
        self.lost_blocks += (ROTATION + DELAY) * island.step_blocks

    def lose(self, island):
        self.fault(island)
        self.ledger.lose(island.name, "silent")
        actions = []
        self.ledger.settle(actions, self.islands, over=False)
        self.carry_out(actions)

    def restart_syncer(self):
        state = json.loads(json.dumps(self.ledger.state()))
        cursors = [dict(newest) for newest in self.ledger._cursors]
        self.ledger = Ledger(FRAGMENTS, ROTATION, 40)
        self.ledger.restore(state, cursors)

    def check(self):
        accounts = self.ledger.accounts()
        assert accounts.merged + accounts.leased + accounts.free == accounts.epochs * accounts.epoch_blocks
        assert accounts.lost == 0
        assert min(accounts.merged, accounts.leased, accounts.free, accounts.trained_twice) >= 0
        assert max(self.merged_blocks.values(), default=1) == 1, "a block is merged once"


def report(island, incarnation=1, *, at=(0, 0), reserve=0, step_blocks=2, phase="running", tokens=0):
    return ev.Report(
        island, incarnation, phase, 0, tokens, 1.0, (), (), (), at[0], at[1], reserve, step_blocks
    )


def part(island, at):
    return ev.Part(island, 1, 0, 1, 1, 1.0, False, *at)


def merge(ledger, fragment, version, **cursors):
    ledger.merging(fragment, version, [part(island, at) for island, at in cursors.items()])
    ledger.merged(fragment, version)
