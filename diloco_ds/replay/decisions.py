"""The tape of a run through a fresh state machine: does it decide again what the live syncer decided?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from diloco_ds.config import RunConfig
from diloco_ds.core.events import Action, Event
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.returning import Origin
from diloco_ds.core.syncer import Syncer
from diloco_ds.core.tape import Entry, Header, Torn, decode_all
from diloco_ds.errors import UserError
from diloco_ds.exchange.store import Mark
from diloco_ds.exchange.syncer_opening import marks_of, origins_of, read_config, read_layout, restored_core
from diloco_ds.observe.manifest import manifest_to_go_on
from diloco_ds.rundir import RunDir


@dataclass(frozen=True)
class Recording:
    """A run's tape, and what it takes to read it."""

    run: RunDir
    manifest: dict[str, Any]
    config: RunConfig
    layout: FragmentLayout

    @classmethod
    def of(cls, run: RunDir) -> Recording:
        """The recording of `run`; UserError if it is no run directory or has no tape."""
        manifest = manifest_to_go_on(run.root)
        if not run.tape.is_file():
            raise UserError(f"{run.root} holds no tape (tape.bin): its syncer was never started")
        return cls(run, manifest, read_config(run), read_layout(run, manifest))

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.manifest["run_id"])

    def records(self) -> Iterator[Header | Entry | Torn]:
        """The tape's records; TapeError for damage in its middle, another version, run or layout."""
        with self.run.tape.open("rb") as lines:
            yield from decode_all(lines, self.run_id, self.layout.digest)


@dataclass(frozen=True)
class Generation:
    """A syncer begins, from `marks`, with so many CPU `threads`; `origins` are given where its memory was lost, and with it
    the store before.
    """

    number: int
    marks: tuple[Mark, ...]
    threads: int
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Moment:
    """An event of a generation, what the tape says was decided, and what the core decides again.

    is_last: nothing follows in its generation; the syncer may have been killed before it had written all actions.
    """

    generation: int
    at: float
    event: Event
    recorded: tuple[Action, ...]
    decided: tuple[Action, ...]
    is_last: bool

    @property
    def difference(self) -> str | None:
        """What the core decides differently, in words; None if nothing."""
        if self.recorded == self.decided:
            return None
        if self.is_last and self.recorded == self.decided[: len(self.recorded)]:
            return None
        count = sum(1 for _ in _common(self.recorded, self.decided))
        tape = str(self.recorded[count]) if count < len(self.recorded) else "nothing more"
        core = str(self.decided[count]) if count < len(self.decided) else "nothing more"
        return (
            f"generation {self.generation}, at {self.at:.6f} s, after {self.event}: "
            f"the tape says {tape}; the core decides {core}"
        )


def replayed(recording: Recording) -> Iterator[tuple[Generation | Moment | Torn, Syncer | None]]:
    """The tape, event by event, with the core as it is after each. TapeError as `Recording.records`."""
    core: Syncer | None = None
    generation = 0
    for first, actions, is_last in _groups(recording.records()):
        if isinstance(first, Torn):
            yield first, core
        elif isinstance(first, Header):
            generation = first.generation
            marks, origins = _state(first, recording.layout)
            core = restored_core(recording.config, recording.layout, recording.manifest, first.state)
            yield Generation(generation, marks, first.threads, origins), core
        elif core is not None:
            decided = tuple(core.step(first.value, first.at))  # type: ignore[arg-type]
            recorded = tuple(actions)
            yield Moment(generation, first.at, first.value, recorded, decided, is_last), core  # type: ignore[arg-type]


def _groups(
    records: Iterable[Header | Entry | Torn],
) -> Iterator[tuple[Header | Entry | Torn, list[Any], bool]]:
    """Headers, torn ends, and events with their actions; and whether a generation ends with them."""
    group: tuple[Entry, list[Any]] | None = None
    for record in records:
        if isinstance(record, Entry) and not record.is_event:
            if group is None:
                raise UserError(f"tape: a decision that follows no event: {record.value}")
            group[1].append(record.value)
            continue
        if group is not None:
            yield (*group, not isinstance(record, Entry))
        group = (record, []) if isinstance(record, Entry) else None
        if group is None:
            yield record, [], False
    if group is not None:
        yield (*group, True)


def _state(header: Header, layout: FragmentLayout) -> tuple[tuple[Mark, ...], tuple[Origin, ...]]:
    try:
        marks, origins = tuple(marks_of(header.state)), tuple(origins_of(header.state))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"tape: generation {header.generation} does not say what it started from") from error
    if len(marks) != layout.fragments:
        raise UserError(f"tape: generation {header.generation} starts from {len(marks)} fragments")
    return marks, origins


def _common(left: tuple[Action, ...], right: tuple[Action, ...]) -> Iterator[Action]:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return
        yield one
