"""Where an island that joins begins to read: apart from all others for as long as that is possible."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.config import Island
from diloco_ds.data.shard import Shard
from diloco_ds.errors import UserError
from diloco_ds.membership import Joining, add, data_start, joining_of, joinings
from diloco_ds.rundir import RunDir


@given(blocks=st.integers(40, 500), done=st.floats(0, 0.45), joiners=st.integers(1, 4), own=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_block_is_read_twice_before_readers_meet(blocks, done, joiners, own):
    front = int(done * blocks)
    each = (blocks - front) // (own * 8)  # well before anybody meets another one
    forward = [Shard(blocks, 3, index, own, 0).take((front + own - 1) // own + each) for index in range(own)]
    starts = [data_start(blocks, front + own, number) for number in range(joiners)]
    backward = [Shard.backwards(blocks, 3, start).take(each) for start in starts]
    taken = [block for blocks_of_one in (*forward, *backward) for block in blocks_of_one]
    assert len(set(taken)) == len(taken)


def test_those_that_join_halve_the_largest_gaps():
    assert [data_start(100, 20, number) for number in range(4)] == [99, 59, 39, 79]


def test_near_the_end_of_an_epoch_the_next_one_counts_too():
    assert data_start(100, 90, 0) == 199


def test_reading_backwards_goes_on_below_the_beginning():
    assert len(set(Shard.backwards(10, 1, 4).take(5))) == 5
    assert sorted(Shard.backwards(10, 1, -1).take(10)) == list(range(10))


def test_a_name_and_a_number_are_given_once(tmp_path):
    run = RunDir(tmp_path)
    add(run, Joining(island=Island(name="c"), number=0, data_from=9))
    add(run, Joining(island=Island(name="d", ranks=2), number=1, data_from=4))
    for name, number in (("c", 2), ("e", 1)):
        with pytest.raises(UserError):
            add(run, Joining(island=Island(name=name), number=number, data_from=9))
    assert [joining.island.name for joining in joinings(run)] == ["c", "d"]
    assert joining_of(run, "d").island.ranks == 2
    assert joining_of(run, "a") is None
