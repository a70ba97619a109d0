import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_config, tiny_run_file, tiny_text
from transformers import AutoTokenizer

from diloco_ds.config import Island
from diloco_ds.data import prepare as preparation
from diloco_ds.data.prepare import prepare
from diloco_ds.data.prepared import Prepared
from diloco_ds.data.tokenizer import train_tokenizer
from diloco_ds.errors import UserError

PREPARE = """
import sys
from pathlib import Path
from rich.console import Console
from diloco_ds.config_file import load_config
from diloco_ds.data.prepare import prepare
print(prepare(load_config(Path(sys.argv[1])), Path(), Console()).digest)
"""


def quiet() -> Console:
    return Console(file=io.StringIO())


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def decoded(prepared: Prepared, blocks) -> str:
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    return tokenizer.decode(blocks.batch(range(len(blocks))).flatten().tolist(), skip_special_tokens=True)


def test_text_goes_where_it_belongs(tmp_path):
    prepared = prepare(tiny_config(tmp_path), tmp_path, quiet())
    documents = tiny_text()
    held, trained = documents[::10], [text for i, text in enumerate(documents) if i % 10]
    assert (prepared.heldout_documents, prepared.train_documents) == (len(held), len(trained))
    assert prepared.heldout_bytes == sum(map(len, held))
    train, heldout = prepared.open_train(), prepared.open_heldout()
    assert heldout is not None
    assert "".join(trained).startswith(decoded(prepared, train))
    assert "".join(held).startswith(decoded(prepared, heldout.blocks))
    assert len(train) == prepared.train_blocks
    assert prepared.train_tokens == len(train) * 64
    # All bytes of the held-out text are predicted but those left over at its end.
    missing = prepared.heldout_bytes - heldout.predicted_bytes(range(len(heldout)))
    assert 0 <= missing < 64 * 4


def test_the_tokenizer_never_sees_held_out_text(tmp_path):
    config = tiny_config(tmp_path, data={"prepare_workers": 2})
    prepared = prepare(config, tmp_path, quiet())
    expected = train_tokenizer([text for i, text in enumerate(tiny_text()) if i % 10], 320)
    assert AutoTokenizer.from_pretrained(prepared.tokenizer).get_vocab() == expected.get_vocab()
    assert prepared.vocab_size == 320
    assert prepared.special_tokens == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def test_prepared_once_and_for_the_same_content_only(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    first = prepare(config, tmp_path, quiet())
    before = files_of(first.directory)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_build", None)  # would fail if it were called again
        assert prepare(config, tmp_path, quiet()) == first
        assert prepare(config.model_copy(update={"name": "other", "seed": 5}), tmp_path, quiet()) == first
    assert files_of(first.directory) == before
    assert (
        prepare(tiny_config(tmp_path, data={"sequence_length": 32}), tmp_path, quiet()).digest != first.digest
    )
    assert (
        prepare(tiny_config(tmp_path, tokenizer={"train_vocab": 300}), tmp_path, quiet()).digest
        != first.digest
    )
    changed = tiny_config(tmp_path / "changed", data={"cache_dir": config.data.cache_dir})
    with Path(str(changed.data.sources[0].files)).open("a") as text:
        text.write(json.dumps({"text": "one more"}) + "\n")
    assert prepare(changed, tmp_path, quiet()).digest != first.digest


def test_the_same_bits_elsewhere(tmp_path):
    one = prepare(tiny_config(tmp_path / "one"), tmp_path, quiet())
    two = prepare(tiny_config(tmp_path / "two"), tmp_path, quiet())
    assert one.digest == two.digest
    assert one.directory != two.directory
    assert files_of(one.directory) == files_of(two.directory)


def test_an_existing_tokenizer_is_taken_as_it_is(tmp_path):
    train_tokenizer(["only these words"], 262).save_pretrained(tmp_path / "tokenizer")
    config = tiny_config(tmp_path, tokenizer={"path": "tokenizer", "train_vocab": None})
    prepared = prepare(config, tmp_path, quiet())
    assert prepared.vocab_size == 262
    assert not (tmp_path / "cache" / "tokenizers").exists()


def test_it_can_be_described_and_found_again(tmp_path):
    prepared = prepare(tiny_config(tmp_path), tmp_path, quiet())
    described = json.loads(json.dumps(prepared.as_dict()))
    assert Prepared.from_dict(described) == prepared
    assert Prepared.read(prepared.directory) == prepared
    assert Prepared.read(tmp_path) is None


def test_nothing_held_out_is_none_and_not_a_guess(tmp_path):
    config = tiny_config(tmp_path)
    source = config.data.sources[0].model_copy(update={"heldout_every": None})
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": [source]})})
    prepared = prepare(config, tmp_path, quiet())
    assert prepared.heldout is None
    assert prepared.open_heldout() is None


@pytest.mark.parametrize(
    ("length", "islands", "says"),
    [
        (64, 800, "fills 793 blocks of 64 tokens, fewer than there are islands"),
        (16384, 2, "does not fill a block of 16384"),
    ],
)
def test_too_little_text_is_one_line_and_leaves_nothing_half_made(tmp_path, length, islands, says):
    config = tiny_config(tmp_path, data={"sequence_length": length})
    config = config.model_copy(update={"islands": [Island(name=f"i{n}") for n in range(islands)]})
    with pytest.raises(UserError, match=says) as error:
        prepare(config, tmp_path, quiet())
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_outside_a_terminal_it_says_in_plain_lines_what_it_did(tmp_path):
    out = io.StringIO()
    prepare(tiny_config(tmp_path), tmp_path, Console(file=out, width=20))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("data: training a tokenizer of 320 entries: done in")
    assert lines[1].startswith(f"data: tokenizing {tmp_path / 'text.jsonl'}: done in")
    assert "training tokens in 793 blocks of 64" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_it_shows_a_bar(tmp_path):
    out = io.StringIO()
    prepare(tiny_config(tmp_path), tmp_path, Console(file=out, force_terminal=True, width=120))
    assert "100%" in out.getvalue()


@pytest.mark.slow
def test_two_processes_at_once_and_what_a_killed_one_left(tmp_path):
    run_file = tiny_run_file(tmp_path)
    command = [sys.executable, "-c", PREPARE, str(run_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    (directory,) = [path for path in (tmp_path / "cache" / "prepared").iterdir() if path.is_dir()]
    assert directory.name == outputs[0][-1]
    before = files_of(directory)

    # A process was killed while it built: its lock is free, its half directory is in the way of nobody.
    leftover = directory.with_name(f".{directory.name}.999999.partial")
    directory.rename(leftover)
    (leftover / "prepared.json").unlink()
    prepared = prepare(tiny_config(tmp_path), tmp_path, quiet())
    assert files_of(prepared.directory) == before
    assert not leftover.exists()


def test_counts_are_in_the_description(tmp_path):
    prepared = prepare(tiny_config(tmp_path), tmp_path, quiet())
    names = {field.name for field in dataclasses.fields(Prepared)}
    assert set(prepared.as_dict()) == names
    assert prepared.as_dict()["train_blocks"] == 793
