import json
from types import SimpleNamespace

from diloco_ds.island import checkpoints
from diloco_ds.island.checkpoints import IslandCheckpoints


def written(store, incarnation, step, complete=True, nbytes=10):
    tag = store.tag(incarnation, step)
    (store.root / tag / "deep").mkdir(parents=True)
    (store.root / tag / "deep" / "weights.pt").write_bytes(b"x" * nbytes)
    if complete:
        store.complete(tag, {"step": step, "bytes": nbytes})
    return tag


def names(store):
    return sorted(path.name for path in store.root.iterdir())


def test_there_may_be_none(tmp_path):
    assert IslandCheckpoints(tmp_path / "missing", 2).newest() is None


def test_the_newest_whole_one_is_found(tmp_path):
    store = IslandCheckpoints(tmp_path, 5)
    written(store, 1, 100)
    newest = written(store, 1, 200)
    written(store, 1, 300, complete=False)
    assert store.newest().tag == newest
    assert store.newest().facts["step"] == 200


def test_a_damaged_mark_does_not_count(tmp_path):
    store = IslandCheckpoints(tmp_path, 5)
    good = written(store, 1, 100)
    bad = written(store, 1, 200)
    (tmp_path / bad / checkpoints.MARK).write_text('{"step": 2')
    assert store.newest().tag == good


def test_a_later_incarnation_is_newer_whatever_its_step(tmp_path):
    store = IslandCheckpoints(tmp_path, 5)
    written(store, 2, 900)
    later = written(store, 10, 50)
    assert store.newest().tag == later


def test_only_the_newest_stay_and_what_is_half_written_goes(tmp_path):
    store = IslandCheckpoints(tmp_path, 2)
    (tmp_path / "incarnation").write_text("3\n")
    (tmp_path / f".{store.tag(1, 50)}.partial").mkdir()
    written(store, 1, 100)
    written(store, 1, 150, complete=False)
    kept = [written(store, 1, 200), written(store, 2, 180)]
    assert names(store) == [*kept, "incarnation"]


def test_a_disk_without_room_is_noticed_before(tmp_path, monkeypatch):
    store = IslandCheckpoints(tmp_path, 2)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _path: SimpleNamespace(free=5_000_000))
    assert store.room_for_another(4_000_000) is None
    assert "5 MB are free, a checkpoint takes 6 MB" in store.room_for_another(6_000_000)
    tag = written(store, 1, 100)
    (tmp_path / tag / checkpoints.MARK).write_text(json.dumps({"bytes": 7_000_000}))
    assert "takes 7 MB" in store.room_for_another(4_000_000)  # the last one's size is the better measure
