"""How programs of the package are started: the collector while they load, and what they give back."""

import subprocess
import sys

from diloco_ds import program

WATCHED = """
import gc
loaded = gc.isenabled()
kept = [[] for _ in range(10_000)]

def main(arguments):
    print(loaded, gc.isenabled(), gc.get_freeze_count() > len(kept), arguments)
    return 7
"""


def test_a_program_loads_without_collections_and_is_left_out_of_later_ones(tmp_path):
    (tmp_path / "watched.py").write_text(WATCHED)
    done = subprocess.run(
        program.command("watched", "a", "b"), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False True True ['a', 'b']\n", done.stderr
    assert done.returncode == 7


def test_an_error_while_it_loads_is_told(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('not today')\n")
    done = subprocess.run(program.command("broken"), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: not today\n")


def test_a_command_collects_more_rarely_and_not_at_its_end():
    script = (
        "import atexit, gc, sys; from diloco_ds import cli;"
        "atexit.register(lambda: print(gc.get_threshold()[0], gc.isenabled(), gc.get_freeze_count() > 0));"
        "sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"{program.OBJECTS} True True"
