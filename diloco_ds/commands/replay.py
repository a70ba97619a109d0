"""Replay a run from its tape: the same decisions, and with kept updates the same weights, bit for bit.

Reads the events the syncer acted on, drives a fresh copy of its state machine with them and compares what it decides with
what the tape says. Where the run kept its updates (syncer.keep_updates) the global weights and the outer optimizer's
state are computed again too, and compared with the newest checkpoint. Exit code 0: identical; 1: not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_ds.arguments import whole

if TYPE_CHECKING:
    from diloco_ds.replay.verdict import Verdict

EXAMPLES = """\
  diloco-ds replay runs/quickstart
  diloco-ds replay runs/quickstart --explain 57
  diloco-ds replay runs/quickstart --json | jq .identical"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument(
        "--explain",
        type=whole(1),
        metavar="STEP",
        help="who was in the merge of this global step, and who not",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Replay the tape and say what came of it."""
    from diloco_ds.replay.verdict import explain, replay
    from diloco_ds.rundir import RunDir

    run_dir = RunDir(arguments.run_dir)
    if arguments.explain is not None:
        lines = explain(run_dir, arguments.explain)
        print(json.dumps({"step": arguments.explain, "lines": lines}) if arguments.json else "\n".join(lines))
        return 0
    verdict = replay(run_dir)
    print(json.dumps(verdict.to_json()) if arguments.json else _in_words(verdict))
    return 0 if verdict.identical else 1


def _in_words(verdict: Verdict) -> str:
    decisions = "identical" if verdict.difference is None else f"NOT identical: {verdict.difference}"
    lines = [
        f"{verdict.events} events of {verdict.generations} generations, {verdict.merges} merges",
        f"decisions: {decisions}",
    ]
    if verdict.torn is not None:
        lines.append(f"the last record is torn at byte {verdict.torn.offset} and was not read")
    weights = verdict.weights
    if weights is None:
        lines.append("weights: not recomputed (the run did not keep its updates: syncer.keep_updates)")
    elif weights.identical:
        lines.append(f"weights: {weights.fragments} fragments are bit for bit those of {weights.against}")
    else:
        which = ", ".join(map(str, weights.differing))
        lines.append(f"weights: NOT those of {weights.against} in fragments {which}")
    return "\n".join(lines)
