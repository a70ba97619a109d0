"""Write the global weights of a run as a Hugging Face model, tokenizer included.

They are those of the newest checkpoint of the syncer; a run that goes on is not disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from diloco_ds.arguments import folder
from diloco_ds.errors import UserError

EXAMPLES = """\
  diloco-ds export runs/quickstart exported
  diloco-ds export runs/quickstart exported --dtype bfloat16
  diloco-ds export runs/quickstart exported --json | jq .tokens"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("out", type=folder, metavar="OUT", help="directory to make")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Export and say where it lies."""
    from diloco_ds.conductor.closing import newest_checkpoint
    from diloco_ds.model.export import export
    from diloco_ds.observe.manifest import read_manifest
    from diloco_ds.rundir import RunDir

    run_dir = RunDir(arguments.run_dir)
    read_manifest(run_dir.root)
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise UserError(
            f"{run_dir.root} has no checkpoint of the global weights yet; there is one every syncer.checkpoint_every_s"
        )
    weights = checkpoint / "theta.safetensors"
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say while they are imported
        export(weights, run_dir.model_config, run_dir.tokenizer, arguments.out, arguments.dtype)
    if arguments.json:
        tokens = json.loads((checkpoint / "state.json").read_text())["tokens"]
        facts = {"run_dir": str(run_dir.root), "out": str(arguments.out), "dtype": arguments.dtype}
        print(json.dumps({**facts, "checkpoint": str(checkpoint), "tokens": tokens}))
    else:
        print(arguments.out)
    return 0
