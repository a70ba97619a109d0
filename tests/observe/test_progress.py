"""The live view, rendered to text: what a reader must find in it, in a terminal of any width and in a pipe."""

import io
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_run import GONE, new_run, record_training, write_status
from rich.console import Console

from diloco_ds.observe.picture import LossTrend, plain_line
from diloco_ds.observe.progress import ProgressView, watch
from diloco_ds.observe.status import Status, read_status
from diloco_ds.observe.units import count, duration

A = {"alive": True, "phase": "running", "incarnation": 1, "step": 40, "tokens_per_s": 1500.0, "loss": 4.25}
DIED = {
    "kind": "event",
    "time": 0.0,
    "event": "died",
    "role": "learner",
    "island": "b",
    "reason": "[SIGKILL]",
}


@pytest.fixture
def status(tmp_path: Path) -> Status:
    """A run at 60 % with island a training and b on its way back."""
    run = new_run(tmp_path)
    record_training(run)
    islands = {"a": {**A, "merged": 30, "missed": 10}, "b": {**A, "alive": False, "merged": 3, "missed": 1}}
    write_status(run, "conductor", state="running")
    write_status(
        run,
        "syncer",
        state="running",
        generation=1,
        global_step=41,
        tokens=600_000,
        merges=38,
        islands=islands,
    )
    write_status(run, "supervisor.a", state="running", pids={"ranks": [os.getpid()]})
    write_status(run, "supervisor.b", state="restarting")
    return read_status(run.root)


def drawn(view: ProgressView, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=40, record=True)
    console.print(view.render(width, 40))
    return console.export_text()


def terminal(width: int = 110) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=True)


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_picture_holds_all_of_a_run(status: Status, width: int) -> None:
    view = ProgressView(terminal(width))
    with view:
        view.update(status, [DIED])
    text = drawn(view, width)
    words = text.split()
    assert max(len(line) for line in text.splitlines()) <= width
    for expected in (
        "running",
        "60",
        "600k/1.00M",
        "41",
        "4.250",
        "1.50k",
        "75",
        "restarting",
        "2.500,",
        "1.250",
    ):
        assert expected in words, f"{expected} is missing at width {width}:\n{text}"
    assert "ETA 4:27" in text  # 400,000 tokens at 1,500 a second
    assert "learner b died: [SIGKILL]" in text


def test_the_trend_falls_with_the_loss(status: Status) -> None:
    view = ProgressView(terminal())
    for step in range(1, 200):
        island = status.islands[0].model_copy(update={"step": step, "loss": 100.0 / step})
        view.update(status.model_copy(update={"islands": [island]}))
    assert re.search("█[▁-▅]+▁▁ ", drawn(view, 110))


def test_before_anything_is_known(status: Status) -> None:
    assert "waiting for the run" in drawn(ProgressView(terminal()), 80)


def test_a_pipe_gets_plain_lines_and_each_event_once(status: Status) -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out, width=80), plain_every_s=3600) as view:
        view.update(status, [DIED, {**DIED, "event": "checkpoint"}, {"kind": "merge", "time": 0.0}])
        view.update(status.model_copy(update={"global_step": 42}))  # too early for the next line
        view.update(
            status.model_copy(update={"global_step": 43, "state": "finished"})
        )  # the end is always told
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("learner b died: [SIGKILL]")
    assert lines[1].startswith(
        "running: step 41, 600k/1.00M tokens | 1.50k tokens/s | ETA 4:27 | a running, step 40"
    )
    assert lines[2].startswith("finished: step 43")
    assert "\x1b" not in out.getvalue()


def test_plain_line_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_status(run, "conductor", state="preparing")
    assert plain_line(read_status(run.root)) == "preparing: step 0, 0/1.00M tokens | a waiting | b waiting"


def test_watch_ends_with_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record_training(run)
    write_status(run, "conductor", pid=GONE, state="finished")
    out = io.StringIO()
    assert watch(run.root, Console(file=out, width=80)).state == "finished"
    assert "b learner restarting: rank 0 <killed>" in out.getvalue()


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 100)), max_size=600))
def test_a_trend_fits_however_long_the_run(points: list[tuple[int, float]]) -> None:
    trend = LossTrend()
    for step, loss in points:
        trend.add(step, loss)
    assert len(trend.sparkline()) <= 16


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.7, "1.00k"),
        (1234, "1.23k"),
        (45_600_000, "45.6M"),
        (999_999, "1.00M"),
        (2e9, "2.00B"),
        (None, "–"),
    ],
)
def test_counts(number: float | None, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07"), (725, "12:05"), (3723, "1:02:03"), (59.6, "1:00"), (None, "–")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
