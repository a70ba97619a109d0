import json

import pytest
import yaml
from lm_eval.tasks import TaskManager

from diloco_ds.evaluate.minimal_pairs import heldout_sentences, swapped_pairs, word_pairs

SENTENCES = (
    "They said that this is a good day.",
    "Many of these are not here today.",
    "What they are, nobody can say for certain.",
    "In San Diego an apple costs a lot.",
    "The roads are bad and the town is far.",
)


def test_one_word_is_replaced_and_both_words_are_equally_often_right():
    assert word_pairs(SENTENCES, "is", "are") == [
        {"good": SENTENCES[0], "bad": "They said that this are a good day."},
        {"good": SENTENCES[1], "bad": "Many of these is not here today."},
        {"good": SENTENCES[4], "bad": "The roads are bad and the town are far."},
        {"good": SENTENCES[2], "bad": "What they is, nobody can say for certain."},
    ]


def test_only_whole_words_count():
    assert word_pairs(SENTENCES, "an", "a") == [
        {"good": SENTENCES[3], "bad": "In San Diego a apple costs a lot."},
        {"good": SENTENCES[0], "bad": "They said that this is an good day."},
    ]
    assert word_pairs(SENTENCES, "he", "him") == []


def test_swapped_words_are_the_same_words_in_another_order():
    pairs = swapped_pairs(SENTENCES)
    assert len(pairs) == len(SENTENCES)
    for pair in pairs:
        good, bad = pair["good"].split(" "), pair["bad"].split(" ")
        assert sorted(good) == sorted(bad)
        changed = [i for i in range(len(good)) if good[i] != bad[i]]
        assert len(changed) == 2
        assert changed[1] == changed[0] + 1
        assert changed[0] > 0
    assert pairs == swapped_pairs(SENTENCES)


def test_only_held_out_prose_is_used(tmp_path):
    held = "This is a plain sentence of seven words. Too short here. It cost 5 [sic] and that is no prose at all."
    rows = [held, "This sentence is for training and must not be seen."] * 2
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    sources = [{"files": str(tmp_path / "t.jsonl"), "format": "json", "heldout_every": 2}]
    assert heldout_sentences(json.dumps(sources)) == ("This is a plain sentence of seven words.",)


@pytest.fixture(scope="module")
def tasks(eval_dir):
    return TaskManager(include_path=[str(eval_dir)], include_defaults=False).load(["minimal_pairs"])["tasks"]


def test_every_kind_gives_balanced_pairs_of_real_prose(tasks, eval_dir):
    assert len(tasks) == 8
    for name, task in tasks.items():
        docs = list(task.validation_docs())
        assert 30 <= len(docs) <= 300, name
        assert len({doc["good"] for doc in docs}) >= 0.75 * len(docs)
        for doc in docs:
            assert task.doc_to_text(doc) == ""
            assert task.doc_to_choice(doc) == [doc["good"], doc["bad"]]
            assert doc["good"] != doc["bad"]
            assert task.doc_to_target(doc) == 0


def test_what_is_measured_is_what_the_quickstart_holds_out(eval_dir):
    """A run on the quickstart's data must never have trained on the sentences of the tasks."""
    common = (eval_dir / "minimal_pairs" / "_minimal_pair_yaml").read_text()
    sources = yaml.safe_load(common.split("\n", 3)[3])["sources"]
    quickstart = yaml.safe_load((eval_dir.parent / "launch" / "quickstart.yaml").read_text())["data"][
        "sources"
    ]
    assert sources == quickstart
