"""What tests of any folder may need."""

import signal

import pytest


@pytest.fixture
def same_signals():
    """Ctrl-C and the like are pytest's again after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
