"""Table 1 of the paper, goodput by chips and learners, computed by the simulator and set against the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from diloco_ds.sim.goodput import System, baselines, percent, simulate

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

PAPER: dict[tuple[str, int], tuple[int, ...]] = {
    ("dp", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("diloco", 2): (94, 88, 80, 70, 54),
    ("diloco", 4): (96, 93, 89, 82, 73),
    ("diloco", 8): (98, 96, 94, 88, 80),
    ("diloco", 16): (99, 98, 96, 93, 86),
}
"""Percent, for CHIPS; arXiv 2604.21428, Table 1 (one year between the interruptions of a chip)."""

BASELINE_HOURS = 240.0
LEARNER_HOURS = 192.0
"""Learners times simulated hours of a cell: the more learners a system has, the less its goodput scatters."""
STEP_S = 30.0
"""Inner step in a cell, seconds. A learner never waits, so its goodput does not depend on it."""


@dataclass(frozen=True)
class Row:
    """One system over all numbers of chips, in percent."""

    kind: Literal["dp", "elastic", "diloco"]
    learners: int
    goodput: list[float]
    paper: list[int]
    uptime: list[float]

    @property
    def difference(self) -> list[float]:
        """Ours minus the paper's, in points."""
        return [round(ours - paper, 3) for ours, paper in zip(self.goodput, self.paper, strict=True)]


@dataclass(frozen=True)
class Table:
    """All rows, and how far they are from the paper's, in points."""

    rows: list[Row]

    @property
    def errors(self) -> list[float]:
        """Distance of every cell."""
        return [abs(each) for row in self.rows for each in row.difference]

    def to_json(self) -> dict[str, Any]:
        """The rows, with the mean and the worst error of the cells."""
        rows = [asdict(row) | {"difference": row.difference} for row in self.rows]
        return {
            "chips": list(CHIPS),
            "rows": rows,
            "mean_error": round(fmean(self.errors), 3),
            "worst_error": max(self.errors),
        }


def compute(base: System) -> Table:
    """All 30 cells under the weather, exchange and seed of `base`; its chips, learners, hours and step are not used."""
    return Table(list(_rows(base)))


def _rows(base: System) -> Iterator[Row]:
    alone = [baselines(replace(base, chips=chips, learners=1), BASELINE_HOURS) for chips in CHIPS]
    for (kind, learners), paper in PAPER.items():
        if kind == "diloco":
            yield _diloco(base, learners, list(paper))
            continue
        accounts = [cell[kind] for cell in alone]
        goodput = [percent(each.goodput) for each in accounts]
        uptime = [percent(1.0 - sum(e - s for s, e in each.pauses) / each.total) for each in accounts]
        yield Row(kind, learners, goodput, list(paper), uptime)  # type: ignore[arg-type]


def _diloco(base: System, learners: int, paper: list[int]) -> Row:
    system = replace(base, learners=learners, hours=LEARNER_HOURS / learners, step_s=STEP_S)
    cells = [simulate(replace(system, chips=chips)) for chips in CHIPS]
    goodput = [percent(cell.goodput) for cell in cells]
    return Row("diloco", learners, goodput, paper, [percent(cell.uptime) for cell in cells])
