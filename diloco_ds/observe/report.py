"""The report of a run: one HTML file that needs nothing but itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from diloco_ds.observe import plots
from diloco_ds.observe.history import History, IslandHistory, gather
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.observe.metrics import iterate_metrics
from diloco_ds.observe.status import IslandStatus, Status, read_status
from diloco_ds.observe.units import count, duration, fixed, percent
from diloco_ds.rundir import RunDir, write_atomically

EVENTS_SHOWN = 300


def write_report(run_dir: Path) -> Path:
    """Write report.html of the run in `run_dir`, as far as the run has come, and return its path.

    UserError if that is no run directory.
    """
    run = RunDir(run_dir)
    manifest = read_manifest(run_dir)
    status = read_status(run_dir)
    history = gather(iterate_metrics(run.metrics))
    environment = Environment(
        loader=PackageLoader("diloco_ds.observe", "."),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": count, "duration": duration, "fixed": fixed, "percent": percent}
    environment.filters |= {"clock": _clock, "date": _date}
    html = environment.get_template("report.html.j2").render(
        manifest=manifest,
        status=status,
        tiles=_tiles(status, manifest, history),
        figures=_figures(history),
        islands=[_island_row(island, status, history) for island in history.islands.values()],
        merges=_merge_rows(history),
        blocks=_block_rows(status),
        heldout=[row for row in history.evaluations if row.get("loss") is not None],
        tasks=_task_rows(history),
        events=history.events[-EVENTS_SHOWN:],
        events_before=max(len(history.events) - EVENTS_SHOWN, 0),
        facts=_facts(manifest),
        packages=manifest.get("packages") or {},
        config=run.config.read_text() if run.config.is_file() else "",
        data=yaml.safe_dump(manifest.get("data") or {}, sort_keys=False),
        written=time.time(),
    )
    write_atomically(run.report, html)
    return run.report


def _tiles(status: Status, manifest: dict[str, Any], history: History) -> list[tuple[str, str, str]]:
    """The headline numbers: (value, name, remark)."""
    target = f"of {count(status.target_tokens)}" if status.target_tokens else ""
    gap = history.longest_gap_steps()
    span = history.last_step - history.first_step if history.first_step and history.last_step else None
    return [
        (fixed(history.final("loss"), 3), "held-out loss", "nats per token, global weights"),
        (fixed(history.final("bits_per_byte"), 3), "bits per byte", "held-out text"),
        (count(status.tokens), "tokens merged", target),
        (count(status.tokens / span) if span else "–", "tokens/s", "merged, over the whole run"),
        (duration(span), "training time", "first to last step"),
        (percent(history.goodput), "goodput", "share of the time in which islands stepped"),
        (fixed(gap, 1), "longest gap", "in usual steps of its island"),
        (str(status.syncer.merges), "merges", f"{status.syncer.drops} updates dropped"),
        (count((manifest.get("model") or {}).get("parameters")), "parameters", ""),
    ]


def _figures(history: History) -> list[tuple[str, str, str]]:
    """Title, explanation and SVG of every plot there is something to show for."""
    candidates = [
        (
            "Held-out loss",
            "Loss of the global weights on text no island trains on; bars: one standard error.",
            plots.heldout,
        ),
        ("Training loss", "Each island's own weights on its own data.", plots.training_loss),
        ("Throughput", "Dotted lines: faults and restarts.", plots.throughput),
        (
            "Participation",
            "Islands that report, that could contribute, and that did, merge by merge.",
            plots.participation,
        ),
        (
            "Where the time goes",
            "Parts of an island's step; they add up to its wall clock.",
            plots.time_buckets,
        ),
        (
            "Timeline",
            "Bars: the island steps; gaps: it does not. Triangles: its faults and restarts.",
            plots.timeline,
        ),
    ]
    drawn = [(title, text, draw(history)) for title, text, draw in candidates]
    return [(title, text, svg) for title, text, svg in drawn if svg is not None]


def _island_row(island: IslandHistory, status: Status, history: History) -> dict[str, Any]:
    now: IslandStatus | None = next((row for row in status.islands if row.name == island.name), None)
    usual, gap = island.usual_step_s, island.longest_gap_s
    return {
        "name": island.name,
        "state": now.state if now else "–",
        "starts": len(island.incarnations) or None,
        "steps": len(island.time),
        "tokens": max((tokens for tokens in island.tokens if tokens == tokens), default=None),
        "step_s": usual,
        "gap_s": gap,
        "gap_steps": gap / usual if gap and usual else None,
        "goodput": history.goodput_of(island),
        "merged": history.merged_updates.get(island.name, 0),
        "merge_share": now.merge_share if now else None,
        "exchange_share": _share_of(island, "exchange"),
    }


def _share_of(island: IslandHistory, bucket: str) -> float | None:
    total = sum(island.bucket_s.values())
    return island.bucket_s.get(bucket, 0.0) / total if total else None


def _merge_rows(history: History) -> list[tuple[str, str]]:
    """Means over all merges."""
    if not history.merges["time"]:
        return []
    means = {name: history.mean_of_merges(name) for name in history.merges}
    load = means["expert_load"]
    return [
        ("islands alive", fixed(means["alive"], 2)),
        ("islands eligible", fixed(means["eligible"], 2)),
        ("islands merged", fixed(means["merged"], 2)),
        ("token share", percent(means["token_share"])),
        ("from opening to merge", _milliseconds(means["round_s"])),
        ("grace window", _milliseconds(means["grace_s"])),
        ("merge and outer step", _milliseconds(means["merge_s"])),
        *([] if load is None else [("tokens of a layer's busiest expert, over the mean", fixed(load, 2))]),
    ]


def _block_rows(status: Status) -> list[tuple[str, str]]:
    """What has become of the data, in blocks; merged, leased and free are all there is."""
    ledger = status.ledger
    if not ledger.epoch_blocks:
        return []
    return [
        (f"blocks in {ledger.epochs} x an epoch", str(ledger.epochs * ledger.epoch_blocks)),
        ("merged", str(ledger.merged)),
        ("leased", str(ledger.leased)),
        ("free", str(ledger.free)),
        ("trained twice", str(ledger.trained_twice)),
        ("of the reserve", str(ledger.reserve)),
    ]


def _task_rows(history: History) -> list[dict[str, Any]]:
    """One row per lm-eval task, of the newest evaluation that ran it."""
    newest: dict[str, dict[str, Any]] = {}
    for evaluation in history.evaluations:
        for task, result in (evaluation.get("tasks") or {}).items():
            newest[task] = {"task": task, "tokens": evaluation.get("tokens"), **result}
    return [newest[task] for task in sorted(newest)]


def _facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    code, model, machine = (manifest.get(part) or {} for part in ("code", "model", "machine"))
    commit = code.get("commit")
    changed = ", with uncommitted changes" if code.get("dirty") else ""
    facts = {
        "run id": manifest.get("run_id"),
        "command": " ".join(manifest.get("argv") or []),
        "code": f"{code.get('version')} ({commit[:12]}{changed})" if commit else code.get("version"),
        "seed": manifest.get("seed"),
        "stops after": manifest.get("stopping_rule"),
        "configuration": manifest.get("config_sha256"),
        "initial weights": model.get("initial_weights_sha256"),
        "fragment layout": model.get("layout_digest"),
        "host": machine.get("host"),
        "processors": f"{machine.get('cpus_usable')} of {machine.get('cpus')}",
        "accelerators": "; ".join(machine.get("gpus") or []) or "none",
        "Python": machine.get("python"),
        "platform": machine.get("platform"),
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f} ms"


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
