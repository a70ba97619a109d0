"""Channel: what a link needs of its transport, and the one inside a process that stands in for MPI in tests.

Nothing here blocks. Messages are small, are copied, and arrive in the order they were sent. Data goes from
buffer to buffer without a copy: the n-th `send` of one end meets the n-th `receive` of the other, of the same
or a larger size, and neither buffer may be touched until its transfer is done.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

MAX_MESSAGE = 1 << 20
"""Most bytes a message may have; larger things travel as data."""


class Transfer(Protocol):
    """A send or receive of data that is under way."""

    @property
    def nbytes(self) -> int:
        """Bytes that travelled; meaningful once done."""

    def done(self) -> bool:
        """Whether the buffer is free again (sent) or filled (received). Asking is what makes it go on."""


class Channel(Protocol):
    """One end of a two-ended transport."""

    def send_message(self, message: bytes) -> None:
        """Send `message`, at most MAX_MESSAGE bytes; returns at once."""

    def receive_message(self) -> bytes | None:
        """The next message, or None if none has arrived."""

    def send(self, data: memoryview) -> Transfer:
        """Begin to send `data`, which may be empty."""

    def receive(self, data: memoryview) -> Transfer:
        """Begin to receive at most `len(data)` bytes into `data`."""


class InProcessChannel:
    """A channel between two objects of one process. Data is copied only when its receiver asks whether it is
    done.
    """

    def __init__(self) -> None:
        self._peer = self
        self._messages: deque[bytes] = deque()
        self._sends: deque[_Posted] = deque()
        self._receives: deque[_Posted] = deque()

    @classmethod
    def pair(cls) -> tuple[InProcessChannel, InProcessChannel]:
        """Two connected ends."""
        one, other = cls(), cls()
        one._peer, other._peer = other, one
        return one, other

    def send_message(self, message: bytes) -> None:
        """See Channel."""
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes is longer than {MAX_MESSAGE}")
        self._peer._messages.append(bytes(message))

    def receive_message(self) -> bytes | None:
        """See Channel."""
        return self._messages.popleft() if self._messages else None

    def send(self, data: memoryview) -> Transfer:
        """See Channel."""
        posted = _Posted(data, self._peer)
        self._sends.append(posted)
        return posted

    def receive(self, data: memoryview) -> Transfer:
        """See Channel."""
        posted = _Posted(data, self)
        self._receives.append(posted)
        return posted

    def _deliver(self) -> None:
        """Carry the oldest send of the peer into the oldest receive of this end."""
        if not self._receives or not self._peer._sends:
            return
        source, target = self._peer._sends.popleft(), self._receives.popleft()
        if len(source.data) > len(target.data):
            raise ValueError(f"{len(source.data)} bytes were sent to a buffer of {len(target.data)}")
        target.data[: len(source.data)] = source.data
        source.arrived = target.arrived = True
        source.nbytes = target.nbytes = len(source.data)


class _Posted:
    """A transfer that waits for its other half."""

    def __init__(self, data: memoryview, receiver: InProcessChannel) -> None:
        self.data = data
        self.nbytes = 0
        self.arrived = False
        self._receiver = receiver

    def done(self) -> bool:
        """See Transfer."""
        if not self.arrived and self in self._receiver._receives:
            self._receiver._deliver()
        return self.arrived
