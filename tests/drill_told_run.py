"""A run as its metrics tell of it, made by hand: a step a second of 100 tokens, a merge of all islands a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco_ds.drill.told import Told, sort_out

Record = dict[str, Any]


def step(island: str, time: float, incarnation: int = 1, tokens: int = 100) -> Record:
    """A step that ended at `time`."""
    return {
        "kind": "step",
        "time": time,
        "island": island,
        "incarnation": incarnation,
        "step_tokens": tokens,
    }


def merge(
    time: float,
    merged: Sequence[str],
    *,
    alive: int = 2,
    late: Sequence[str] = (),
    generation: int = 1,
    **more: Any,
) -> Record:
    """A merge with answers in time of `merged`, and late ones of `late`."""
    parts = [{"island": island, "late": False} for island in merged]
    parts += [{"island": island, "late": True} for island in late]
    return {
        "kind": "merge",
        "time": time,
        "generation": generation,
        "parts": parts,
        "alive": alive,
        "eligible": alive,
        "merged": len(parts),
        "token_share": 0.9,
        "fragment": int(time) % 4,
        "tokens": int(100 * time),
        **more,
    }


def fault(time: float, number: int, kind: str, target: str, event: str = "fault") -> Record:
    """Something that was done to an island, or to the syncer."""
    island = None if target == "syncer" else target.partition(".")[0]
    return _event(time, event, "chaos", island=island, fault=kind, target=target, number=number)


def restart(time: float, role: str, island: str) -> Record:
    """The conductor started a part again."""
    return _event(time, "restart", role, island=island)


def phase(time: float, phase: str) -> Record:
    """The syncer ordered another phase."""
    return _event(time, "phase", "syncer", phase=phase)


def member(time: float, happened: str, island: str) -> Record:
    """An island has joined or left."""
    return _event(time, happened, "conductor", island=island)


def evaluation(time: float, loss: float) -> Record:
    """Of the global weights."""
    return {"kind": "eval", "time": time, "loss": loss}


def steps(island: str, seconds: Iterable[float], incarnation: int = 1) -> list[Record]:
    """A step that ends at each of these seconds."""
    return [step(island, second, incarnation) for second in seconds]


def told(*records: Record | list[Record]) -> Told:
    """All of them sorted out."""
    flat: list[Record] = []
    for each in records:
        flat += each if isinstance(each, list) else [each]
    return sort_out(flat)


def _event(time: float, event: str, role: str, **fields: Any) -> Record:
    return {"kind": "event", "time": time, "event": event, "role": role, **fields}
