import math

import pytest
import torch

from diloco_ds.core.flat import PIECE
from diloco_ds.core.screen import OutlierScreen, is_finite, norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, PIECE + 6])
def test_one_bad_element_anywhere_is_found(bad, place):
    flat = torch.ones(PIECE + 7)
    assert is_finite(flat)
    flat[place] = bad
    assert not is_finite(flat)


def test_large_finite_values_are_finite():
    assert is_finite(torch.full((9,), 3e38))


def test_norm_by_hand():
    assert norm(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 5.0])) == 5  # (3, -4)


def test_norm_in_pieces_equals_the_whole():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 2 * PIECE + 5, generator=generator)
    assert norm(a, b) == pytest.approx(float(torch.linalg.vector_norm((a - b).double())), rel=1e-12)


def test_norm_refuses_other_sizes():
    with pytest.raises(ValueError, match="differ"):
        norm(torch.zeros(3), torch.zeros(4))


def test_nothing_is_an_outlier_before_five_norms_are_known():
    screen = OutlierScreen(10)
    assert [screen.check(0, size) for size in (1.0, 500.0, 1.0, 1.0, 1.0)] == [None] * 5
    assert screen.check(0, 500.0) == "its norm 500 is over 10 times the fragment's median 1"
    assert screen.check(0, 10.0) is None


def test_fragments_have_medians_of_their_own():
    screen = OutlierScreen(10)
    for _ in range(5):
        screen.check(0, 1.0)
        screen.check(1, 100.0)
    assert screen.check(0, 100.0) is not None
    assert screen.check(1, 100.0) is None


def test_refused_norms_do_not_move_the_median_and_accepted_ones_do():
    screen = OutlierScreen(10, history=5)
    for _ in range(5):
        screen.check(0, 1.0)
    for _ in range(50):
        assert screen.check(0, 11.0) is not None
    for _ in range(3):
        assert screen.check(0, 9.0) is None
    assert screen.check(0, 11.0) is None  # the median of the last five is 9 now


def test_a_fragment_that_did_not_move_makes_nobody_an_outlier():
    screen = OutlierScreen(10)
    for _ in range(9):
        screen.check(0, 0.0)
    assert screen.check(0, 1.0) is None


def test_it_goes_on_from_the_history_of_another():
    screen, next_one = OutlierScreen(10, history=5), OutlierScreen(10, history=5)
    for size in range(1, 8):
        screen.check(0, float(size))
    assert (screen.history(0), screen.history(1)) == ((3.0, 4.0, 5.0, 6.0, 7.0), ())
    next_one.restore(0, screen.history(0))
    assert next_one.check(0, 51.0) == "its norm 51 is over 10 times the fragment's median 5"
    assert next_one.check(0, 50.0) is None
    assert next_one.history(0) == (4.0, 5.0, 6.0, 7.0, 50.0)


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_refused_at_once(size):
    assert "its norm is" in OutlierScreen(10).check(0, size)
