"""Write the HTML report of a run, finished or not, with its plots inside."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = "  diloco-ds report runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")


def run(arguments: argparse.Namespace) -> int:
    """Write report.html into the run directory and say where it lies."""
    from diloco_ds.observe.report import write_report

    print(write_report(arguments.run_dir))
    return 0
