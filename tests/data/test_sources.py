import json
import sys
from pathlib import Path

import datasets
import pytest

from diloco_ds.config import TextSource
from diloco_ds.data.sources import open_source
from diloco_ds.errors import UserError

TEXTS = ["zero", "one", "two", "three", "four"]


def read(tmp_path: Path, **source):
    documents = open_source(TextSource(**source), tmp_path, tmp_path / "cache")
    return [(document.text, document.heldout) for document in documents]


def texts(tmp_path: Path, **source):
    return [text for text, _ in read(tmp_path, **source)]


def jsonl(path: Path, column: str = "text") -> None:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in TEXTS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same documents in every format."""
    jsonl(tmp_path / "lines.jsonl")
    (tmp_path / "list.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    (tmp_path / "object.json").write_text(
        json.dumps({f"k{text}": {"text": text, "n": None} for text in TEXTS}, indent=1)
    )
    (tmp_path / "one_line.json").write_text(json.dumps({f"k{text}": {"text": text} for text in TEXTS}))
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS) + "\n\n")
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "table.parquet")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "form"),
    [
        ("lines.jsonl", "json"),
        ("list.json", "json"),
        ("object.json", "json"),
        ("one_line.json", "json"),
        ("lines.txt", "text"),
        ("table.parquet", "parquet"),
        ("saved", "arrow"),
        ("saved/*.arrow", "arrow"),
    ],
)
def test_every_format_gives_the_same_documents(folder, files, form):
    assert texts(folder, files=files, format=form) == TEXTS


def test_a_document_a_file(tmp_path):
    for name in ("b/1999-x.txt", "a/2020-y.txt", "2021-z.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(f"line of {name}\nsecond\n")
    (tmp_path / "d" / "empty.txt").write_text(" \n")
    found = read(tmp_path, files="d", format="document", heldout_files="^202")
    assert found == [
        ("line of 2021-z.txt\nsecond\n", True),
        ("line of a/2020-y.txt\nsecond\n", True),
        ("line of b/1999-x.txt\nsecond\n", False),
    ]


def test_every_nth_document_is_held_out_and_empty_ones_do_not_count(tmp_path):
    (tmp_path / "t.txt").write_text("a\n\nb\nc\n  \nd\ne\n")
    found = read(tmp_path, files="t.txt", format="text", heldout_every=3)
    assert found == [("a", True), ("b", False), ("c", False), ("d", True), ("e", False)]


def test_columns_are_joined_and_lists_become_lines(tmp_path):
    rows = {
        "x": {"title": "Soup", "steps": ["Boil.", "Eat."], "note": None},
        "y": {"title": "Tea", "steps": []},
    }
    (tmp_path / "r.json").write_text(json.dumps(rows))
    found = texts(tmp_path, files="r.json", format="json", text_field=["title", "steps"])
    assert found == ["Soup\nBoil.\nEat.", "Tea"]


def test_files_of_a_package_are_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "textpackage_for_test"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    jsonl(package / "data" / "t.jsonl")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = texts(tmp_path, package="textpackage_for_test", files="data/*.jsonl", format="json")
    assert found == TEXTS
    assert "textpackage_for_test" not in sys.modules


def test_a_hub_name_goes_to_datasets_untouched(tmp_path, monkeypatch):
    """A directory with data stands in for the hub: `load_dataset` takes both."""
    jsonl(tmp_path / "train.jsonl", "content")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = TextSource(hub=str(tmp_path), split="train[:3]", text_field="content")
    documents = open_source(source, Path("/nowhere"), tmp_path / "cache")
    assert [document.text for document in documents] == TEXTS[:3]
    assert documents.fingerprint == open_source(source, Path("/nowhere"), tmp_path / "cache").fingerprint


def test_the_fingerprint_is_of_content_and_rules(tmp_path):
    def fingerprint(directory: str, **more) -> str:
        source = TextSource(files="t.jsonl", format="json", **more)
        return open_source(source, tmp_path / directory, tmp_path / "cache").fingerprint

    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "t.jsonl", "text" if name != "c" else "other")
    assert fingerprint("a") == fingerprint("b")
    assert fingerprint("a") != fingerprint("c")
    assert fingerprint("a") != fingerprint("a", heldout_every=2)
    assert fingerprint("a") != fingerprint("a", text_field="other")


def test_a_sample_is_evenly_spaced_training_text(tmp_path):
    (tmp_path / "t.txt").write_text("".join(f"document number {i:04}\n" for i in range(1000)))
    source = TextSource(files="t.txt", format="text", heldout_every=10)
    sample = list(open_source(source, tmp_path, tmp_path / "cache").training_sample(max_bytes=2000))
    assert sample[0] == "document number 0001"  # 0000 is held out
    assert 80 <= len(sample) <= 100
    assert sample[-1] > "document number 0980"
    assert not any(int(text[-4:]) % 10 == 0 for text in sample)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"files": "missing.jsonl", "format": "json"}, "there is no file .*missing.jsonl"),
        ({"files": "empty_folder", "format": "parquet"}, "no file ending in .parquet in the directory"),
        ({"files": "t.jsonl", "format": "json", "text_field": "txt"}, "no column 'txt'; did you mean 'text'"),
        ({"files": "t.jsonl", "format": "json", "text_field": "n"}, "column 'n' .*holds .*int64.*, not text"),
        ({"files": "broken.jsonl", "format": "json"}, "cannot be read"),
        ({"files": "latin1.txt", "format": "text"}, "cannot be read: .*utf-8"),
        (
            {"files": "x", "format": "text", "package": "not_installed_at_all"},
            "'not_installed_at_all' is not installed",
        ),
        ({"files": "x", "format": "text", "package": "with-dash"}, "'with-dash' is not installed"),
        ({"files": "none.txt", "format": "text"}, "is empty"),
        ({"files": "t.jsonl", "format": "document", "heldout_files": "("}, "not a regular expression"),
        ({"hub": "no/such_data_set"}, "the data set 'no/such_data_set' cannot be read"),
    ],
)
def test_bad_sources_are_one_line(tmp_path, monkeypatch, source, says):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    jsonl(tmp_path / "t.jsonl")
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(UserError, match=says) as error:
        read(tmp_path, **source)
    assert "\n" not in str(error.value)
