"""What an island that joins may be, and the one line for what it may not."""

import pytest

from diloco_ds.conductor import joining
from diloco_ds.errors import UserError

OF_ITS_OWN = "name, ranks, deepspeed, master_port, threads_per_rank, env, link_args"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("ranks=0", "ranks: must be greater than 0, not 0"),
        ("ranks=two", "ranks: must be a whole number, not 'two'"),
        ("env=3", "env: must be a block of keys, not 3"),
        ("master_port=80", "master_port: must be greater than or equal to 1024, not 80"),
        (
            "name=C 2",
            "name: must be 1 to 32 small letters, digits, - and _, the first a letter or digit, not 'C 2'",
        ),
        *(
            (
                setting,
                f"{setting.partition('.')[0]}: an island that joins has the run's model, data and exchange; "
                f"of its own are {OF_ITS_OWN}",
            )
            for setting in ("model.overrides.vocab_size=500", "tokenizer.train_vocab=500", "vocab_size.x=500")
        ),
    ],
)
def test_what_it_may_not_be_is_one_line(setting, expected):
    with pytest.raises(UserError) as caught:
        joining._island(["name=c", setting])
    assert str(caught.value) == f"command line: {expected}"


def test_what_it_may_be():
    island = joining._island(["name=c", "ranks=2", "deepspeed.zero_optimization.stage=3"])
    assert (island.name, island.ranks) == ("c", 2)
    assert island.deepspeed == {"zero_optimization": {"stage": 3}}
