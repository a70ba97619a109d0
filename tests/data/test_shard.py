import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.data.shard import BlockOrder

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**31 - 1)


@given(blocks=sizes, seed=seeds, epoch=st.integers(-(2**40), 2**40))
@settings(max_examples=60)
def test_an_epoch_holds_every_block_once(blocks, seed, epoch):
    order = BlockOrder(blocks, seed)
    start = epoch * blocks
    assert sorted(order[start + i] for i in range(blocks)) == list(range(blocks))


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
    order = BlockOrder(10**12, 0)
    taken = [order[10**15 + 1000 * i] for i in range(5)]
    assert len(set(taken)) == 5
    assert all(0 <= block < 10**12 for block in taken)
