"""Failpoints: the place, the count, and which process."""

import os
import signal
import subprocess
import sys

from failpoints import Failpoints

PASSES_BY = """
from diloco_ds.exchange.failpoint import failpoint
for place in ("here", "there", "there"):
    failpoint(place)
    print(place, flush=True)
"""


def passes_by(**environment):
    return subprocess.run(
        [sys.executable, "-c", PASSES_BY],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_by_name_and_count():
    done = passes_by(DILOCO_DS_FAILPOINT="there:2")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["here", "there"])
    assert passes_by(DILOCO_DS_FAILPOINT="elsewhere").returncode == 0


def test_by_folder_one_process_is_hit_and_only_once(tmp_path):
    points = Failpoints(tmp_path / "points")
    assert passes_by(**points.environment).returncode == 0
    armed = points.arm("there", "SIGTERM", WHO="link.*", RANK="1")
    for other in ({}, {"WHO": "link.a"}, {"WHO": "syncer", "RANK": "1"}):
        assert passes_by(**points.environment, **other).returncode == 0
    assert armed.hit() is None
    done = passes_by(**points.environment, WHO="link.a", RANK="1")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGTERM, ["here"])
    assert armed.hit() is not None
    assert passes_by(**points.environment, WHO="link.a", RANK="1").returncode == 0
