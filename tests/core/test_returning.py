"""After the loss of the syncer's memory: who returns what, and which version numbers follow."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.core.returning import VERSION_GAP, Origin, choose_returns, first_version, in_words


def test_the_newest_is_taken_and_equals_share_the_work():
    saved = [5, 5, 5, 5]
    held = {"a": [6, 7, 5, 6], "b": [6, 6, 4, 6], "c": [-1, -1, -1, -1]}
    assert choose_returns(saved, held) == {"a": {0: 6, 1: 7}, "b": {3: 6}}
    assert choose_returns(saved, {}) == {}
    assert choose_returns(saved, {"c": [-1, 5, 5, 0]}) == {}


versions = st.lists(st.integers(-1, 9), min_size=3, max_size=3)


@given(saved=versions, held=st.dictionaries(st.sampled_from("abc"), versions))
def test_every_newer_fragment_is_returned_once_by_one_who_holds_it(saved, held):
    chosen = choose_returns(saved, held)
    asked = [fragment for wanted in chosen.values() for fragment in wanted]
    assert len(asked) == len(set(asked))
    for island, wanted in chosen.items():
        for fragment, version in wanted.items():
            assert version == held[island][fragment] == max(each[fragment] for each in held.values())
            assert version > saved[fragment]
    for fragment in set(range(3)) - set(asked):
        assert all(each[fragment] <= saved[fragment] for each in held.values())


@given(
    saved=st.integers(0, 10 * VERSION_GAP),
    merges=st.lists(st.integers(0, VERSION_GAP - 1), min_size=1, max_size=4),
    returns=st.data(),
)
def test_no_version_is_used_twice_however_often_one_checkpoint_is_gone_back_to(saved, merges, returns):
    """Generation after generation starts from the same checkpoint, makes merges and loses its memory."""
    used = saved
    for generations, made in enumerate(merges, start=1):
        returned = returns.draw(st.none() | st.integers(saved, used))
        first = first_version(saved, generations, returned)
        assert first > used
        used = first + made


def test_what_is_lost_is_said():
    words = in_words([Origin(7, 5, "a"), Origin(5, 5), Origin(6, 5, "b")], {0: 2, 2: 1})
    assert "2 of 3 fragments" in words
    assert "returned by a, b" in words
    assert "fragment 0 by 2, 2 by 1" in words
    assert "all 3 are those of the checkpoint" in in_words([Origin(5, 5)] * 3, {})
