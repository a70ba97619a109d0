import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.core.fragments import FragmentLayout, TensorSpec, balance
from diloco_ds.errors import UserError


def tensors(*sizes, embeddings=()):
    return [TensorSpec(f"t{i}", (size,), i in embeddings) for i, size in enumerate(sizes)]


def names(layout):
    return [[placed.spec.name for placed in layout.tensors_of(p)] for p in range(layout.fragments)]


def test_largest_first_into_the_lightest_by_hand():
    # By size: t1 = 7 -> p0, t3 = 5 -> p1, t2 = 4 -> p1 (5 < 7), t0 = 3 -> p0 (7 < 9), t4 = 2 -> p1 (9 < 10)
    layout = balance(tensors(3, 7, 4, 5, 2), 2, 8)
    assert names(layout) == [["t0", "t1"], ["t2", "t3", "t4"]]
    assert layout.numels == (10, 11)
    assert [placed.offset for placed in layout.tensors] == [0, 3, 0, 4, 9]
    assert layout.offsets == (0, 4)


def test_the_embedding_is_a_fragment_of_its_own_and_counts_as_one():
    layout = balance(tensors(2, 100, 3, 4, embeddings=[1]), 3, 3)
    assert names(layout) == [["t1"], ["t3"], ["t0", "t2"]]
    assert [layout.embedding(p) for p in range(3)] == [True, False, False]
    assert layout.numel(0) == 100


def test_two_embeddings_are_two_fragments_unless_there_is_no_room():
    specs = tensors(50, 60, 3, 4, embeddings=[0, 1])
    assert names(balance(specs, 3, 3)) == [["t1"], ["t0"], ["t2", "t3"]]
    assert names(balance(specs, 2, 3)) == [["t0", "t1"], ["t2", "t3"]]


def test_one_fragment_holds_everything():
    layout = balance(tensors(50, 3, embeddings=[0]), 1, 500)
    assert names(layout) == [["t0", "t1"]]
    assert not layout.embedding(0)
    assert layout.offsets == (0,)


def test_only_embeddings_are_balanced_like_the_rest():
    assert names(balance(tensors(5, 4, 1, embeddings=[0, 1, 2]), 2, 2)) == [["t0"], ["t1", "t2"]]


def test_fewer_tensors_than_fragments():
    layout = balance(tensors(5, 4, embeddings=[0]), 24, 24)
    assert layout.fragments == 2
    assert layout.offsets == (0, 12)


def test_turns():
    layout = balance(tensors(1, 1, 1), 3, 8)
    assert layout.offsets == (0, 2, 5)
    assert [layout.fragment_at(step) for step in range(10)] == [
        0,
        None,
        1,
        None,
        None,
        2,
        None,
        None,
        0,
        None,
    ]


@pytest.mark.parametrize(
    ("specs", "fragments", "period", "says"),
    [
        ([], 2, 4, "no tensor"),
        (tensors(1) * 2, 2, 4, "'t0' is given twice"),
        (tensors(1, 0), 2, 4, "'t1' of shape .* no elements"),
        (tensors(1, 1, 1), 3, 2, "3 fragments do not fit a period of 2"),
        (tensors(1), 0, 2, "0 fragments"),
    ],
)
def test_what_cannot_be_divided_is_refused(specs, fragments, period, says):
    with pytest.raises(UserError, match=says):
        balance(specs, fragments, period)


def test_json_round_trip_and_digest():
    layout = balance([TensorSpec("a", (2, 3), True), TensorSpec("b", (), False)], 2, 5)
    again = FragmentLayout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest
    assert len(layout.digest) == 64
    assert balance([TensorSpec("a", (3, 2), True), TensorSpec("b", (), False)], 2, 5).digest != layout.digest


def changed(change):
    value = json.loads(balance(tensors(1, 2, 3), 2, 4).to_json())
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"period": 1}',
        changed(lambda value: value["offsets"].__setitem__(1, 0)),
        changed(lambda value: value["offsets"].__setitem__(1, 4)),
        changed(lambda value: value["tensors"][0].__setitem__("fragment", 9)),
        changed(lambda value: value["tensors"][0].__setitem__("offset", 1)),
        changed(lambda value: value["tensors"].clear()),
        changed(lambda value: value["tensors"][0].pop("name")),
    ],
)
def test_a_text_that_is_no_layout_is_refused(text):
    with pytest.raises(UserError, match="not a fragment layout"):
        FragmentLayout.from_json(text)


def optimum(sizes, count):
    return min(
        max(sum(size for size, place in zip(sizes, places, strict=True) if place == p) for p in range(count))
        for places in itertools.product(range(count), repeat=len(sizes))
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3), st.booleans())
def test_the_largest_fragment_is_at_most_four_thirds_of_the_optimum(sizes, count, with_embedding):
    specs = tensors(*sizes)
    if with_embedding:
        specs.insert(len(specs) // 2, TensorSpec("embedding", (1000,), True))
    layout = balance(specs, count + with_embedding, 8)
    others = [p for p in range(layout.fragments) if not layout.embedding(p)]
    assert max(layout.numel(p) for p in others) <= 4 / 3 * optimum(sizes, count)
    if with_embedding:
        assert [placed.spec.name for placed in layout.tensors_of(0)] == ["embedding"]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(12, 40),
)
def test_every_layout_is_whole_and_the_same_each_time(entries, fragments, period):
    specs = [TensorSpec(f"t{i}", (size,), embedding) for i, (size, embedding) in enumerate(entries)]
    layout = balance(specs, fragments, period)
    assert sorted(placed.spec.name for placed in layout.tensors) == sorted(spec.name for spec in specs)
    assert layout.fragments == min(fragments, len(specs))
    assert all(numel > 0 for numel in layout.numels)
    assert sum(layout.numels) == sum(spec.numel for spec in specs)
    assert sorted(set(layout.offsets)) == list(layout.offsets)
    gaps = [b - a for a, b in itertools.pairwise([*layout.offsets, layout.offsets[0] + period])]
    assert max(gaps) - min(gaps) <= 1
    assert FragmentLayout.from_json(layout.to_json()) == layout == balance(specs, fragments, period)
