"""The virtual-time driver: it always comes to an end."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_ds.config import Exchange
from diloco_ds.sim.goodput import even_layout, new_learner
from diloco_ds.sim.learner import Direction, Speed, Wire
from diloco_ds.sim.world import World


@pytest.mark.parametrize("late", ["drop", "merge_next"])
def test_a_draining_run_with_a_silent_learner_ends(late):
    """A learner that has drained is silent past its lease while a slower one still steps."""
    exchange = Exchange.model_validate({"merge": {"late": late}, "grace": {"safety": 0.0}})
    speeds = [1.0, 1.0, 1.0, 40.0]
    learners = [
        new_learner(f"l{m}", exchange, Speed(speed, 0.1), np.random.default_rng(m))
        for m, speed in enumerate(speeds)
    ]
    world = World(even_layout(exchange, 24_000), exchange, learners, budget=300_000)
    fed = 0
    feed = world._feed

    def counted(event):
        nonlocal fed
        fed += 1
        assert fed < 20_000, f"it goes round in circles at {world.now}"
        feed(event)

    world._feed = counted
    tally = world.run(100_000.0)
    assert tally.finished is not None
    assert world.syncer.merged_tokens >= 0.9 * 300_000


def test_a_newer_value_takes_the_place_of_one_that_waits():
    arrived = []
    wire = Direction(Wire(latency_s=0.5, bytes_s=10.0), lambda value, at: arrived.append((value, at)))
    assert wire.put(0, "a", 100) is None
    assert wire.carry(0.0) is None
    assert wire.put(1, "b", 100) is None
    assert wire.carry(1.0) == 10.0
    assert wire.put(1, "c", 50) == "b"
    assert wire.carry(10.0) is None
    assert arrived == [("a", 10.5), ("c", 15.5)]
