"""The drills themselves: whole runs, what is done to them, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_ds.chaos.schedule import generate, mix
from diloco_ds.config import RunConfig
from diloco_ds.config_file import load_config
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.drill import scavenging, speeds, storm
from diloco_ds.drill.live import Live, live_run, told_of
from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import batch_of
from diloco_ds.observe.status import read_status
from diloco_ds.rundir import RunDir, new_directory, write_atomically, write_json

LEAD_S = 15.0
"""Without faults, before a storm or a throttling begins: what comes after is compared with it."""
TAIL_S = 40.0
"""Without faults, after a storm: the last victims come back, and what they made is merged."""
PARTS = 3
"""Scavenging: the guest comes after a third of the tokens and leaves after two."""
FOR_EVER_S = 1e6

Say = Callable[[str], None]


def weather_storm(
    run_file: Path,
    settings: list[str],
    root: Path,
    *,
    minutes: float,
    rate: float,
    seed: int,
    with_calm: bool,
    say: Say,
) -> dict[str, Any]:
    """A run of some `minutes` with `rate` faults an hour and, with `with_calm`, the same run without; both in `root`.

    The result is `storm.measure`'s. UserError if the configuration cannot tell how long a run takes.
    """
    config = load_config(run_file, settings)
    seconds = 60 * minutes
    tokens = round((LEAD_S + seconds + TAIL_S) * _tokens_per_s(config))
    settings = [*settings, f"budget.tokens={tokens}"]
    islands = {island.name: island.ranks for island in config.islands}
    schedule = generate(seed, mix(rate), seconds, islands)
    if not schedule.faults:
        raise UserError(f"no fault in {minutes:g} minutes at {rate:g} per hour with seed {seed}: take more")
    root = _directory(root)
    write_atomically(root / "storm.yaml", schedule.to_yaml())
    if with_calm:
        say(f"{len(config.islands)} islands, {tokens:,} tokens, without faults: {root / 'calm'}")
        with live_run(root / "calm", run_file, settings) as run:
            run.until_finished()
    say(f"the same with {len(schedule.faults)} faults in {minutes:g} minutes: {root / 'storm'}")
    with live_run(root / "storm", run_file, settings) as run:
        _wait(run, run.until_all_are_merged() + LEAD_S)
        say("the storm begins")
        run.carry_out("chaos", "--schedule", str(root / "storm.yaml"))
        say("the storm is over")
        told = run.until_finished()
    calm = told_of(root / "calm") if with_calm else None
    asked = {"seed": seed, "per_hour": rate, "set_step_s": config.trainer.least_step_s}
    return _kept(root, {**asked, **storm.measure(told, calm, read_status(root / "storm").ledger)})


def mix_speeds(run_file: Path, settings: list[str], root: Path, *, factor: float, say: Say) -> dict[str, Any]:
    """A run for each of `speeds.CASES`, whose second island is throttled; all in `root`."""
    config = load_config(run_file, settings)
    if len(config.islands) != 2:
        raise UserError(f"{run_file}: mixed speeds are for two islands, the second of which is slowed down")
    fast, slow = (island.name for island in config.islands)
    root = _directory(root)
    cases = {}
    for number, (name, its_settings) in enumerate(speeds.CASES.items(), start=1):
        say(f"{name}: {root / f'case-{number}'}")
        with live_run(root / f"case-{number}", run_file, [*settings, *its_settings]) as run:
            calm_since = run.until_all_are_merged()
            _wait(run, calm_since + LEAD_S)
            throttle = (
                "--fault",
                "slow",
                "--target",
                slow,
                "--factor",
                f"{factor:g}",
                "--seconds",
                f"{FOR_EVER_S:g}",
            )
            chaos = run.command("chaos", *throttle)
            told = run.until_finished()
            chaos.wait()
        cases[name] = speeds.measure(told, fast, slow, _fragments(run.dir), calm_since)
    return _kept(root, {"factor": factor, "cases": cases})


def scavenge(run_file: Path, settings: list[str], root: Path, *, say: Say) -> dict[str, Any]:
    """A run of one island that another joins for the middle third, and the same run alone; both in `root`."""
    config = load_config(run_file, settings)
    if len(config.islands) != 1:
        raise UserError(f"{run_file}: scavenging begins with one island, which another one joins")
    stays = config.islands[0].name
    guest = "guest" if stays != "guest" else "another"
    root = _directory(root)
    say(f"one island alone: {root / 'alone'}")
    with live_run(root / "alone", run_file, settings) as run:
        alone = run.until_finished()
    say(f"the same with a guest for the middle third: {root / 'together'}")
    with live_run(root / "together", run_file, settings) as run:
        run.until_tokens(config.budget.tokens / PARTS)
        threads = config.islands[0].threads_per_rank
        run.carry_out("join", "--island", guest, *([f"threads_per_rank={threads}"] if threads else []))
        run.until(lambda: run.told().merged_parts(guest, 0.0) or None, f"{guest} was merged")
        run.until_tokens(config.budget.tokens * 2 / PARTS)
        run.carry_out("leave", guest)
        together = run.until_finished()
    return _kept(root, scavenging.measure(together, alone, stays, guest))


def _tokens_per_s(config: RunConfig) -> float:
    """What the islands make together at their set pace."""
    if not config.trainer.least_step_s:
        raise UserError("a storm needs a pace that does not depend on the machine: set trainer.least_step_s")
    sequences = 0
    for island in config.islands:
        micro_batch, accumulation = batch_of(config.deepspeed_of(island.name), island.ranks)
        sequences += island.ranks * micro_batch * accumulation
    return float(sequences * config.data.sequence_length / config.trainer.least_step_s)


def _wait(run: Live, moment: float) -> None:
    """Until a step ends after `moment` (epoch seconds)."""
    run.until(
        lambda: any(steps[-1].time >= moment for steps in run.told().steps.values()) or None,
        "it was calm for long enough",
    )


def _fragments(run: RunDir) -> int:
    return FragmentLayout.from_json(run.layout.read_text()).fragments


def _directory(wanted: Path) -> Path:
    """A new directory for the runs: `wanted`, or wanted-2, ..."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    return new_directory(wanted)


def _kept(root: Path, result: dict[str, Any]) -> dict[str, Any]:
    """`result`, also as result.json in `root`."""
    write_json(root / "result.json", result)
    return result
