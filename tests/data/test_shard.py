import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.data.shard import BlockOrder, Shard

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**31 - 1)


@given(blocks=sizes, seed=seeds, epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_block_once(blocks, seed, epoch):
    order = BlockOrder(blocks, seed)
    start = epoch * blocks
    assert sorted(order[start + i] for i in range(blocks)) == list(range(blocks))


@given(blocks=sizes, seed=seeds, count=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_islands_together_take_the_whole_order_and_no_position_twice(blocks, seed, count):
    each = -(-3 * blocks // count)  # three epochs
    taken = [Shard(blocks, seed, index, count).take(each) for index in range(count)]
    dealt = list(itertools.chain.from_iterable(zip(*taken, strict=True)))
    order = BlockOrder(blocks, seed)
    assert dealt == [order[i] for i in range(len(dealt))]
    for epoch in range(3):
        assert sorted(dealt[epoch * blocks : (epoch + 1) * blocks]) == list(range(blocks))


@given(seed=seeds, steps=st.lists(st.integers(0, 9), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_a_saved_position_goes_on_exactly(seed, steps):
    through = Shard(101, seed, 1, 3)
    wanted = through.take(sum(steps))
    got = []
    position = 0
    for n in steps:
        shard = Shard(101, seed, 1, 3, position)
        got += shard.take(n)
        position = shard.position
    assert got == wanted
    assert position == through.position == sum(steps)


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    first = [BlockOrder(1000, 5)[i] for i in range(1000)]
    assert first == [BlockOrder(1000, 5)[i] for i in range(1000)]
    assert first != [BlockOrder(1000, 6)[i] for i in range(1000)]
    assert first != [BlockOrder(1000, 5)[1000 + i] for i in range(1000)]
    # Written down once: another order would make a resumed run read other data.
    assert first[:5] == [736, 186, 426, 454, 687]


def test_order_looks_random():
    order = [BlockOrder(10_000, 1)[i] for i in range(10_000)]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 20  # 2 expected
    halves = sum(block < 5000 for block in order[:5000])
    assert 2300 < halves < 2700  # 2500 +- 35


def test_huge_orders_cost_nothing():
    blocks = 10**12
    shard = Shard(blocks, 0, 3, 1000, position=10**9)
    taken = shard.take(5)
    assert len(set(taken)) == 5
    assert all(0 <= block < blocks for block in taken)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_island_outside_its_count_is_refused(index):
    with pytest.raises(ValueError, match="island"):
        Shard(10, 0, index, 2)
