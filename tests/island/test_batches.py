import time

import numpy as np
import pytest
import torch

from diloco_ds.data.blocks import BlockFile
from diloco_ds.data.shard import Shard
from diloco_ds.island.batches import Batches
from diloco_ds.island.pace import PacedBatches


def blocks(count=100, length=4):
    return BlockFile(np.arange(count * length, dtype=np.uint16).reshape(count, length))


def taken(batches, steps):
    try:
        return [batches.next() for _ in range(steps)]
    finally:
        batches.close()


def test_the_ranks_share_out_each_batch_of_the_island():
    whole = taken(Batches(blocks(), Shard(100, 7, 0, 2), 0, 1, 6, False), 3)
    halves = [taken(Batches(blocks(), Shard(100, 7, 0, 2), rank, 2, 3, False), 3) for rank in (0, 1)]
    for step in range(3):
        assert torch.equal(torch.cat([half[step].rows for half in halves]), whole[step].rows)
        assert halves[0][step].position == halves[1][step].position == whole[step].position == 6 * (step + 1)
    assert whole[0].rows.dtype == torch.int64
    assert whole[0].rows.shape == (6, 4)


def test_what_was_read_ahead_is_read_again_after_a_restart():
    one_go = taken(Batches(blocks(), Shard(100, 7, 1, 2), 0, 1, 5, False), 6)
    first = taken(Batches(blocks(), Shard(100, 7, 1, 2), 0, 1, 5, False), 2)
    position = first[-1].position
    rest = taken(Batches(blocks(), Shard(100, 7, 1, 2, position), 0, 1, 5, False), 4)
    assert [batch.rows.tolist() for batch in [*first, *rest]] == [batch.rows.tolist() for batch in one_go]


def test_an_error_of_the_reader_reaches_the_loop():
    class Broken:
        def batch(self, indices):
            raise OSError("the disk is gone")

    batches = Batches(Broken(), Shard(100, 7, 0, 1), 0, 1, 2, False)
    with pytest.raises(RuntimeError, match="cannot be read") as caught:
        batches.next()
    assert isinstance(caught.value.__cause__, OSError)
    batches.close()


def test_a_set_pace_holds_back_and_is_not_made_up_for():
    batches = PacedBatches(0.1, blocks(), Shard(100, 7, 0, 1), 0, 1, 1, False)
    given = []
    try:
        for step in range(6):
            batches.next()
            given.append(time.monotonic())
            if step == 2:
                time.sleep(0.35)  # a step that takes longer than three
    finally:
        batches.close()
    gaps = np.diff(given)
    assert all(gap > 0.099 for gap in gaps), "the pace is kept, also after a long step"
    assert gaps[2] >= 0.35
