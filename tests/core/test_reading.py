"""The learner's half of the ledger: which blocks a batch is made of, with leases in hand and without."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.core import events as ev
from diloco_ds.core.lease import Lease, flat, unflat
from diloco_ds.core.reading import PIECES, Reading


def orders(*leases, reader=1):
    return ev.Orders("run", 0, 0, (), reader, flat(leases))


def test_batches_are_read_lease_by_lease_and_a_batch_goes_over_their_border():
    reading = Reading(1, 0, 4)
    both = orders(Lease(3, 100, 6), Lease(5, 40, 12))
    assert reading.plan_batch(both) == ((100, 4),)
    assert reading.plan_batch(both) == ((104, 2), (40, 2))
    assert reading.position == (0, 0), "what is read ahead is not trained on"
    reading.trained()
    assert reading.position == (3, 4)
    reading.trained()
    assert (reading.position, reading.reserve) == ((5, 2), 0)
    assert reading.plan_batch(orders(Lease(7, 0, 12))) == ((0, 4),), (
        "a lease that orders name no more is left"
    )


def test_without_a_lease_it_reads_on_in_the_reserve_and_says_so():
    reading = Reading(2, 3, 4)
    assert not reading.has_lease(orders(Lease(1, 0, 12)))  # that was the incarnation before
    (first,) = reading.plan_batch(orders(Lease(1, 0, 12)))
    mixed = reading.plan_batch(orders(Lease(2, 50, 3), reader=2))
    assert first[0] < 0
    assert mixed == ((50, 3), (first[0] + 4, 1))
    for _ in range(2):
        reading.trained()
    assert (reading.position, reading.reserve) == ((2, 3), 5)
    elsewhere = [
        Reading(incarnation, index, 4).plan_batch(orders()) for incarnation, index in ((2, 4), (3, 3))
    ]
    assert len({first[0], *(pieces[0][0] for pieces in elsewhere)}) == 3


def test_a_batch_of_many_pieces_is_filled_up_from_the_reserve():
    pieces = Reading(1, 0, 9).plan_batch(orders(*(Lease(n, 10 * n, 1) for n in range(1, 9))))
    assert len(pieces) == PIECES
    assert sum(blocks for _, blocks in pieces) == 9
    assert [start for start, _ in pieces[:-1]] == [10, 20, 30]
    assert pieces[-1][0] < 0


@given(st.lists(st.builds(Lease, st.integers(1, 99), st.integers(0, 2**40), st.integers(1, 99)), max_size=5))
def test_leases_travel_as_integers(leases):
    assert unflat(flat(leases)) == leases


@pytest.mark.parametrize("step_blocks", [0, -1])
def test_a_batch_has_blocks(step_blocks):
    with pytest.raises(ValueError, match="batch"):
        Reading(1, 0, step_blocks)
