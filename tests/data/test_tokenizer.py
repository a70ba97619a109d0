import os

import pytest
from tiny_run import tiny_text
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diloco_ds.data.tokenizer import (
    leading_bos,
    load_tokenizer,
    tokenizer_hash,
    tokenizing_threads,
    train_tokenizer,
    vocabulary_size,
)
from diloco_ds.errors import UserError


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(tiny_text(), 320)


def test_trained_tokenizer_round_trips_any_text(trained):
    text = "  Naïve café — 東京 😀\n\ttabs, spaces  \x00"
    ids = trained(text)["input_ids"]
    assert ids[0] == trained.bos_token_id == 2
    assert trained.decode(ids, skip_special_tokens=True) == text
    assert (trained.pad_token_id, trained.eos_token_id) == (0, 1)
    assert vocabulary_size(trained) == len(trained) == 320
    assert leading_bos(trained) == 2


def test_training_is_deterministic_and_learns_words(trained):
    assert tokenizer_hash(train_tokenizer(tiny_text(), 320)) == tokenizer_hash(trained)
    assert tokenizer_hash(train_tokenizer(tiny_text(), 330)) != tokenizer_hash(trained)
    text = tiny_text()[0]
    assert len(trained(text)["input_ids"]) < len(text) / 1.8


def test_saved_and_loaded_it_is_the_same(trained, tmp_path):
    trained.save_pretrained(tmp_path / "saved")
    for loaded in (load_tokenizer("saved", tmp_path), AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert tokenizer_hash(loaded) == tokenizer_hash(trained)
        assert loaded("The river")["input_ids"] == trained("The river")["input_ids"]


def test_what_cannot_be_used_is_one_line(trained, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, bos_token="<bos>").save_pretrained(
        tmp_path / "no_eos"
    )
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("no_eos", "no EOS token"),
        ("empty", "cannot be read"),
        ("./missing", "there is no directory"),
        ("some/where/else", "there is no directory"),
    ):
        with pytest.raises(UserError, match=says) as error:
            load_tokenizer(name, tmp_path)
        assert "\n" not in str(error.value)


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with tokenizing_threads(1):
        assert (os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"]) == ("1", "false")
    assert os.environ["RAYON_NUM_THREADS"] == "7"
    assert "TOKENIZERS_PARALLELISM" not in os.environ
