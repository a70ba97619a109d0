"""What a killed writer leaves in the run directory is removed when nobody writes any more; nothing else is."""

from diloco_ds.conductor.ending import remove_unfinished
from diloco_ds.rundir import RunDir


def test_only_what_was_never_renamed_goes(tmp_path):
    run = RunDir(tmp_path)
    unfinished = [
        tmp_path / ".manifest.json.17.partial",
        tmp_path / "status" / ".syncer.json.17.partial",
        tmp_path / "checkpoints" / "syncer" / ".000004.partial" / "theta.safetensors",
        tmp_path / "checkpoints" / "islands" / "a" / ".i00001-s000000007.partial" / "0" / "optim.pt",
        tmp_path / "updates" / ".0001-00000002.safetensors.partial",
    ]
    kept = [
        tmp_path / "metrics.jsonl",
        tmp_path / "status" / "supervisor.a.lock",
        tmp_path / "checkpoints" / "syncer" / "000003" / "theta.safetensors",
        tmp_path / "wandb" / ".somebody.partial",
    ]
    for path in (*unfinished, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    remove_unfinished(run)
    assert [path for path in unfinished if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert not (tmp_path / "checkpoints" / "syncer" / ".000004.partial").exists()


def test_a_directory_that_is_not_there_is_no_fault(tmp_path):
    remove_unfinished(RunDir(tmp_path / "never"))
