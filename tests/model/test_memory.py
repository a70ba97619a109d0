"""Starting from a checkpoint and exporting take the memory of a layer, not of the model."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("peak_memory.py")


def peak(work, directory):
    """Bytes that the work took at its peak, in a process of its own."""
    done = subprocess.run(
        [sys.executable, SCRIPT, work, directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def test_a_model_passes_through_tensor_by_tensor(tmp_path):
    peaks = {work: peak(work, tmp_path) for work in ("whole", "start", "empty", "export")}
    print(peaks)
    shards = sorted(path.name for path in (tmp_path / "hf").glob("model-*.safetensors"))
    model_bytes = sum((tmp_path / "hf" / name).stat().st_size for name in shards)
    assert model_bytes > 200e6
    assert peaks["whole"] > 0.9 * model_bytes  # the measure sees a model that is in memory
    for work in ("start", "empty", "export"):
        assert peaks[work] < 0.4 * model_bytes, peaks  # a shard of 50 MB, and what becomes of it on its way
    exported = sorted(path.name for path in (tmp_path / "exported").glob("model-*.safetensors"))
    assert len(exported) == len(shards) > 1
    first, again = ({} for _ in range(2))
    for name in shards:
        first |= load_file(tmp_path / "hf" / name)
        again |= load_file(tmp_path / "exported" / name)
    assert first.keys() == again.keys()
    assert all((first[name] == again[name]).all() for name in first)
