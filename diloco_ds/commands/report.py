"""Write the HTML report of a run, finished or not, with its plots inside."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """\
  diloco-ds report runs/quickstart
  diloco-ds report runs/quickstart --json | jq -r .report"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write report.html into the run directory and say where it lies."""
    from diloco_ds.observe.report import write_report

    report = write_report(arguments.run_dir)
    if arguments.json:
        print(json.dumps({"run_dir": str(arguments.run_dir), "report": str(report)}))
    else:
        print(report)
    return 0
