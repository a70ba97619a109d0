"""`diloco-ds drill`: what cannot be drilled is refused in one line before anything starts; what its tables say."""

import signal

import pytest
from drill_told_run import fault, merge, phase, restart, steps, told
from tiny_run import tiny_run_file

from diloco_ds import cli
from diloco_ds.drill import storm, tables


@pytest.fixture(autouse=True)
def handlers():
    """The command takes over SIGINT, SIGTERM and SIGHUP; they are given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("drill", "islands", "arguments", "expected"),
    [
        (
            "storm",
            2,
            [],
            "a storm needs a pace that does not depend on the machine: set trainer.least_step_s",
        ),
        ("storm", 2, ["--minutes", "0"], "--minutes: must be a number above 0, not '0'"),
        ("storm", 2, ["--rate", "nan"], "--rate: must be a number above 0, not 'nan'"),
        ("storm", 2, ["--seed", "-1"], "--seed: must be a whole number of 0 or more, not '-1'"),
        ("storm", 2, ["trainer.least_step_s=-1"], "trainer.least_step_s"),
        (
            "storm",
            2,
            ["trainer.least_step_s=1", "--minutes", "0.001"],
            "no fault in 0.001 minutes at 125 per hour",
        ),
        ("speeds", 3, [], "mixed speeds are for two islands"),
        ("speeds", 2, ["--factor", "1"], "--factor: must be a number above 1, not '1'"),
        ("scavenge", 2, [], "scavenging begins with one island"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, capsys, drill, islands, arguments, expected):
    run_file = tiny_run_file(tmp_path / "given", islands=islands)
    out = tmp_path / "out"
    assert cli.main(["drill", drill, str(run_file), *arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert not out.exists()


@pytest.mark.slow
def test_a_run_that_does_not_start_is_refused_with_its_own_words(tmp_path, capsys):
    run_file = tiny_run_file(tmp_path / "given", islands=1, deepspeed={"optimizer": {"type": "Adamm"}})
    assert cli.main(["drill", "scavenge", str(run_file), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the run did not finish: diloco-ds: error: " in said
    assert "Adamm" in said


def test_the_table_of_a_storm_says_which_goal_is_missed():
    story = told(
        steps("a", range(1, 101)),
        steps("b", [each for each in range(1, 101) if not 60 < each < 66]),
        [merge(second + 0.1, "ab") for second in range(2, 101)],
        fault(50.5, 0, "kill", "a.agent"),
        restart(52.0, "link", "a"),
        phase(99.5, "drain"),
    )
    table = tables.storm_table({"set_step_s": 1.0, **storm.measure(story, None)})
    lines = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in map(_cells, table.splitlines())
    }
    assert lines["longest gap of a survivor, steps"] == ["6.00", "at most 3: MISSED"]
    assert lines["merged of those alive"] == ["100 %", "at least 0.9: met"]
    assert lines["back, link: n, median, longest, s"][0] == "1, 1.6, 1.6"
    assert lines["blocks lost"] == ["–", "exactly 0: not measured"]
    assert len({len(line) for line in table.splitlines()}) == 1


def _cells(line: str) -> list[str]:
    return line.split("|")
