"""What tests of any folder may need, and the order of the files: the longest first, so that none of them is last alone."""

import signal

import pytest
from hypothesis import settings

# How long an example takes says nothing on a busy machine, and a run of the tests can be repeated.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

LONGEST = ("test_chaos", "test_matrix", "test_resume", "test_storm", "test_whole_run", "test_expert_parallel")


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def same_signals():
    """Ctrl-C and the like are pytest's again after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
