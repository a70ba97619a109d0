"""A syncer's state machine to be driven by hand: two islands, what they report and answer."""

from __future__ import annotations

from diloco_ds.config import Exchange
from diloco_ds.core import events as ev
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.syncer import Syncer


def layout_of(fragments, period):
    specs = [TensorSpec(f"w{i}", (8,), embedding=False) for i in range(fragments)]
    return balance(specs, fragments, period)


def exchange_of(fragments, **settings_):
    return Exchange(
        **{"fragments": fragments, "period": fragments, "overlap": min(2, fragments - 1), **settings_}
    )


def syncer_of(fragments=2, islands=("a", "b"), budget=10**9, **settings_):
    exchange = exchange_of(fragments, **settings_)
    syncer = Syncer(layout_of(fragments, exchange.period), exchange, budget=budget, lease=10.0)
    for island in islands:
        syncer.step(ev.Joined(island), 0.0)
    return syncer


def report(island, step, *, base=(0, 0), steps=None, incarnation=1, phase="running", step_time=1.0):
    steps = [step] * len(base) if steps is None else steps
    return ev.Report(
        island, incarnation, phase, step, 10 * step, step_time, steps, [10 * s for s in steps], list(base)
    )


def answer(island, fragment, round_, base, steps, *, update_id=1, incarnation=1, tokens=None):
    tokens = 10 * steps if tokens is None else tokens
    return ev.Answer(island, incarnation, fragment, round_, base, steps, tokens, update_id)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]
