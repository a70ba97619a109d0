import numpy as np
import pytest
import torch

from diloco_ds.data.blocks import BlockFile
from diloco_ds.data.shard import BlockOrder
from diloco_ds.island import pace
from diloco_ds.island.batches import Batches
from diloco_ds.island.pace import PacedBatches

ORDER = BlockOrder(100, 7)
PIECES = [((0, 6),), ((6, 2), (40, 4)), ((44, 1), (90, 2), (-12, 3))]


def blocks(count=100, length=4):
    return BlockFile(np.arange(count * length, dtype=np.uint16).reshape(count, length))


def taken(rank, ranks, sequences):
    batches = Batches(blocks(), ORDER, rank, ranks, sequences, False)
    try:
        for pieces in PIECES:
            batches.read(pieces)
        return [batches.next() for _ in PIECES]
    finally:
        batches.close()


def test_a_batch_is_made_of_its_pieces_in_order():
    places = [[*range(6)], [6, 7, 40, 41, 42, 43], [44, 90, 91, -12, -11, -10]]
    for batch, of_it in zip(taken(0, 1, 6), places, strict=True):
        assert batch.dtype == torch.int64
        assert torch.equal(batch, blocks().batch([ORDER[place] for place in of_it]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_share_out_each_batch_of_the_island(ranks):
    shares = [taken(rank, ranks, 6 // ranks) for rank in range(ranks)]
    for whole, parts in zip(taken(0, 1, 6), zip(*shares, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_an_error_of_the_reader_reaches_the_loop():
    class Broken:
        def batch(self, indices):
            raise OSError("the disk is gone")

    batches = Batches(Broken(), ORDER, 0, 1, 2, False)
    batches.read([(0, 2)])
    with pytest.raises(RuntimeError, match="cannot be read") as caught:
        batches.next()
    assert isinstance(caught.value.__cause__, OSError)
    batches.close()


class Clock:
    """Stands in for `time`: it goes on only where somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_set_pace_holds_back_and_is_not_made_up_for(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    batches = PacedBatches(0.1, blocks(), ORDER, 0, 1, 1, False)
    for place in range(6):
        batches.read([(place, 1)])
    given = []
    try:
        for step in range(6):
            batches.next()
            given.append(clock.monotonic())
            if step == 2:
                clock.sleep(0.35)  # a step that takes longer than three
    finally:
        batches.close()
    assert given == pytest.approx([100.0, 100.1, 100.2, 100.55, 100.65, 100.75]), (
        "the pace is kept, also after a long step"
    )


def test_pieces_that_are_no_batch_are_an_error():
    batches = Batches(blocks(), ORDER, 0, 2, 3, False)
    batches.read([(0, 5)])
    with pytest.raises(RuntimeError) as caught:
        batches.next()
    assert "for a batch of 6 blocks" in str(caught.value.__cause__)
    batches.close()
