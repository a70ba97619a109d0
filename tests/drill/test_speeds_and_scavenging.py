"""Mixed speeds, and an island that comes and goes: measured on records made by hand."""

import pytest
from drill_told_run import evaluation, fault, member, merge, phase, steps, told

from diloco_ds.drill import scavenging, speeds
from diloco_ds.errors import UserError


def test_mixed_speeds():
    story = told(
        steps("fast", range(1, 101)),
        steps("slow", [*range(1, 21), *range(24, 101, 4)]),
        [merge(second + 0.1, ["fast", "slow"]) for second in range(2, 20)],
        fault(20.0, 0, "slow", "slow"),
        [merge(second + 0.1, ["fast"]) for second in range(21, 90)],
        merge(90.1, ["fast"], late=["slow"], fragment=3),
        merge(91.1, ["fast", "slow"], late=["slow"], fragment=0),
        phase(100.5, "drain"),
        evaluation(110, 3.0),
    )
    result = speeds.measure(story, "fast", "slow", fragments=4, calm_since=2.0)
    assert result["goodput_fast"] == pytest.approx(1.0)
    assert result["slowed_by"] == pytest.approx(4.0)
    assert (result["fragments_of_slow_merged"], result["late_of_slow"]) == (2, 2)
    assert result["merges"] == 71
    assert result["merges_with_slow"] == pytest.approx(2 / 71)
    assert result["merged_mean"] == pytest.approx(74 / 71)
    assert result["loss"] == 3.0
    with pytest.raises(UserError, match="slow was not throttled"):
        speeds.measure(told(steps("fast", range(9))), "fast", "slow", 4, 0.0)


def test_scavenging():
    """The guest is merged from 43 on and has left at 70: then 200 tokens are merged a second, else 100."""
    tokens, merges = 0, []
    for second in range(1, 101):
        together = 43 <= second <= 70
        tokens += 200 if together else 100
        merges.append(merge(second, ["a", "guest"] if together else ["a"], tokens=tokens))
    story = told(
        steps("a", [second for second in range(1, 101) if second != 50]),
        merges,
        member(40.0, "joined", "guest"),
        member(70.0, "left", "guest"),
        evaluation(110, 2.0),
    )
    alone = told(
        [merge(second, ["a"], tokens=100 * second) for second in range(1, 129)], evaluation(140, 2.1)
    )
    result = scavenging.measure(story, alone, "a", "guest")
    assert result["tokens_per_s"] == {"one": 100.0, "two": 200.0, "one_again": 100.0}
    assert result["speed_up"] == 2.0
    assert result["seconds"] == {"together": 99.0, "alone": 127.0}
    assert result["sooner"] == pytest.approx(28 / 127)
    assert result["join_to_merge_s"] == 3.0
    assert result["longest_gap_steps"] == 2.0
    assert result["loss"] == {"together": 2.0, "alone": 2.1}
    with pytest.raises(UserError, match="guest has not joined"):
        scavenging.measure(alone, alone, "a", "guest")
