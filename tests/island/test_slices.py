"""Ranges of masters and copies, without DeepSpeed: the arithmetic that the real ranks rely on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.errors import UserError
from diloco_ds.island.slices import FragmentSlices, Ranks, Slice, adopt, find_slices


def ranks(rank=0, count=1, total=lambda tensor: None):
    return Ranks(rank, count, torch.device("cpu"), total)


@given(st.integers(0, 20), st.integers(1, 10), st.integers(0, 40), st.integers(0, 40))
def test_a_cut_holds_the_same_elements_of_the_fragment(start, length, low, high):
    fragment = torch.arange(40.0)
    whole = Slice(start, length, torch.cat([torch.zeros(3), fragment[start : start + length]]), offset=3)
    part = whole.cut(low, high)
    expected = [i for i in range(start, start + length) if low <= i < high]
    assert (part.values().tolist() if part else []) == expected


@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_unsharded_masters_are_shared_out_evenly_and_each_element_once(count, sizes, fragments):
    parameters = {f"p{i}": torch.nn.Parameter(torch.randn(size)) for i, size in enumerate(sizes)}
    specs = [TensorSpec(name, tuple(p.shape), False) for name, p in parameters.items()]
    layout = balance(specs, fragments, period=8)
    owned = [[0] * numel for numel in layout.numels]
    for rank in range(count):

        def total(tensor):  # stands for the other ranks; what they really hold is summed up below
            tensor[: layout.fragments] = torch.tensor(layout.numels)

        for index, found in enumerate(
            find_slices(object(), parameters, layout, ranks(rank, count, total), {})
        ):
            shares = sum(part.length for part in found.owned)
            assert abs(shares - found.numel / count) < 1
            for part in found.owned:
                for element in range(part.start, part.stop):
                    owned[index][element] += 1
    assert owned == [[1] * numel for numel in layout.numels]


def test_a_part_of_a_tensor_lies_where_it_begins_in_the_whole():
    """The second of two ranks holds the last two of four experts."""
    parameters = {"experts": torch.nn.Parameter(torch.randn(2, 3)), "norm": torch.nn.Parameter(torch.ones(1))}
    layout = balance([TensorSpec("experts", (4, 3), False), TensorSpec("norm", (1,), False)], 1, 1)

    def total(tensor):  # the first rank's experts and half of the norm
        tensor[0] = 13

    (found,) = find_slices(object(), parameters, layout, ranks(1, 2, total), {"experts": 6})
    source = torch.arange(13.0)
    adopt(found, source, "overwrite", 0.0, None, ranks())
    assert parameters["experts"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert parameters["norm"].tolist() == [12]


def test_masters_nobody_holds_are_refused():
    parameters = {"w": torch.nn.Parameter(torch.ones(4))}
    layout = balance([TensorSpec("w", (4,), False)], 1, 1)
    with pytest.raises(UserError, match="of the 4 elements of fragment 0 the ranks hold 2"):
        find_slices(
            object(), parameters, layout, ranks(0, 2), {}
        )  # half of it, and no second rank adds its own


def test_masters_that_are_not_fp32_are_refused():
    parameters = {"w": torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    layout = balance([TensorSpec("w", (4,), False)], 1, 1)
    with pytest.raises(UserError, match=r"master weights are torch\.bfloat16, they must be fp32"):
        find_slices(object(), parameters, layout, ranks(), {})


def two_ranks():
    """A fragment of 6 whose masters two ranks hold by halves, with a whole bf16 copy on each."""
    fragments = []
    for rank in (0, 1):
        master = Slice(3 * rank, 3, torch.full((3,), 1.0 + rank))
        fragment = FragmentSlices(6, [master], [master], [Slice(0, 6, torch.zeros(6, dtype=torch.bfloat16))])
        fragment.shared = [(0, 6)]
        fragments.append(fragment)
    return fragments


def test_overwrite_needs_no_other_rank_and_fills_the_whole_copy():
    def nobody(tensor):
        raise AssertionError("overwrite must not wait for other ranks")

    for fragment in two_ranks():
        adopt(fragment, torch.arange(6.0), "overwrite", 0.0, None, ranks(total=nobody))
        assert fragment.masters[0].values().tolist() == list(
            range(fragment.masters[0].start, fragment.masters[0].stop)
        )
        assert fragment.copies[0].values().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("how", "alpha", "snapshot", "expected"),
    [
        ("mix", 0.25, None, [0.25, 1.0, 1.75, 2.75, 3.5, 4.25]),  # 0.25 * (1 1 1 2 2 2) + 0.75 * (0 .. 5)
        ("mix", 0.0, None, [0, 1, 2, 3, 4, 5]),
        ("mix", 1.0, None, [1, 1, 1, 2, 2, 2]),
        (
            "rebase",
            0.0,
            torch.full((6,), 0.5),
            [0.5, 1.5, 2.5, 4.5, 5.5, 6.5],
        ),  # (0 .. 5) + (1 1 1 2 2 2) - 0.5
    ],
)
def test_mix_and_rebase_by_hand_with_copies_from_the_other_ranks_master(how, alpha, snapshot, expected):
    for rank, fragment in enumerate(two_ranks()):
        other = torch.tensor(expected)
        other[3 * rank : 3 * rank + 3] = 0  # what the other rank adds to the sum
        adopt(
            fragment,
            torch.arange(6.0),
            how,
            alpha,
            snapshot,
            ranks(total=lambda t, other=other: t.add_(other)),
        )
        assert fragment.masters[0].values().tolist() == expected[3 * rank : 3 * rank + 3]
        assert fragment.copies[0].values().tolist() == expected


def test_rebase_without_a_snapshot_is_an_error():
    with pytest.raises(ValueError, match="needs the snapshot"):
        adopt(two_ranks()[0], torch.zeros(6), "rebase", 0.0, None, ranks())
