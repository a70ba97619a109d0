"""Who belongs to a run, as its directory says."""

import pytest

from diloco_ds.config import Island
from diloco_ds.errors import UserError
from diloco_ds.membership import Joining, add, joinings
from diloco_ds.rundir import RunDir


def test_a_name_and_a_number_are_given_once(tmp_path):
    run = RunDir(tmp_path)
    add(run, Joining(island=Island(name="c"), number=0))
    add(run, Joining(island=Island(name="d", ranks=2), number=1))
    for name, number in (("c", 2), ("e", 1)):
        with pytest.raises(UserError):
            add(run, Joining(island=Island(name=name), number=number))
    assert [joining.island.name for joining in joinings(run)] == ["c", "d"]
    assert joinings(run)[1].island.ranks == 2
