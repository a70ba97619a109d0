"""Files that are written whole or not at all."""

import contextlib
import resource

import pytest

from diloco_ds.rundir import write_atomically, write_json, write_once


@contextlib.contextmanager
def full_disk():
    """No file can grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("write", [write_atomically, write_json])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_what_is_written_once_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_once(path, "first")
    assert list(tmp_path.iterdir()) == []
    assert [write_once(path, "first"), write_once(path, "second")] == [True, False]
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "first")]
