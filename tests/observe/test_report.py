"""The report: self-contained, right in its numbers, and there however little is known."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_run import GONE, new_run, record_training, write_status

from diloco_ds.errors import UserError
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.observe.report import write_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Text of a page; fails on tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.figures = 0
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.figures += tag == "figure"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data.strip())


def page_of(run_root: Path) -> Page:
    path = write_report(run_root)
    assert path == run_root / "report.html"
    return Page(path.read_text())


LEDGER = {"epoch_blocks": 1000, "epochs": 2, "merged": 1357, "leased": 0, "free": 643, "trained_twice": 24}


def test_the_report_of_a_finished_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record_training(run)
    write_status(run, "conductor", pid=GONE, state="finished")
    islands = {name: {"phase": "drained", "merged": 80, "missed": 20} for name in "ab"}
    write_status(
        run, "syncer", pid=GONE, state="finished", tokens=190_000, merges=100, islands=islands, ledger=LEDGER
    )
    page = page_of(run.root)
    assert page.figures == 6
    for expected in (
        "finished",
        "2.500",
        "1.250",
        "190k",
        "90 %",
        "pairs",
        "0.7500",
        "0.0125",
        "1200",
        "blocks in 2 x an epoch",
        "1357",
        "trained twice",
        "cd" * 32,
    ):
        assert expected in page.words, f"{expected} is missing"
    assert "rank 0 <killed>" in page.words


def test_the_report_needs_nothing_but_itself(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record_training(run)
    html = write_report(run.root).read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert all(link.startswith("#") for link in links)
    assert "<script" not in html
    assert re.findall(r"url\((?!#)", html) == []
    assert "@import" not in html
    assert "#010203" not in html  # every plot takes its ink from the page


def test_a_run_without_a_single_step(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.config.unlink()
    page = page_of(run.root)
    assert page.figures == 0
    assert "No step has been made yet." in page.words


@pytest.mark.parametrize("kinds", [("step",), ("merge",), ("eval",), ("event",), ("step", "merge")])
def test_a_run_of_which_only_some_records_are_there(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    run = new_run(tmp_path)
    record_training(run, steps=30)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text(
        "".join(line for line in lines if any(f'"kind":"{kind}"' in line for kind in kinds))
    )
    assert page_of(run.root).words


def test_records_with_nothing_but_their_kind(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with MetricsFile(run.metrics) as metrics:
        metrics.write("step", island="a")
        metrics.write("step", island="a", loss=float("nan"))
        metrics.write("merge")
        metrics.write("eval", tasks={"t": {}})
        metrics.write("event")
    assert "t" in page_of(run.root).words


def test_the_load_of_experts_is_told_where_it_is_known(tmp_path: Path) -> None:
    run, row = new_run(tmp_path), "tokens of a layer's busiest expert, over the mean"
    with MetricsFile(run.metrics) as metrics:
        metrics.write("merge")
        assert row not in page_of(run.root).words
        for load in (1.25, 1.5):
            metrics.write("merge", expert_load=load)
    words = page_of(run.root).words
    assert row in words
    assert "1.38" in words


def test_a_report_is_replaced_by_the_next(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert page_of(run.root).figures == 0
    record_training(run)
    assert page_of(run.root).figures == 6


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
