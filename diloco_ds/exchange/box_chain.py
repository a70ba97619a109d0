"""What the two sides of a transfer need of a fragment box, and several boxes that look like one.

A link has one sender and one receiver, since its channel carries one fragment at a time each way. Where it carries the
fragments of more than one box, their numbers go on from one box to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar


class Box(Protocol):
    """Fragments, each with a newest version; as FragmentBox."""

    path: Path
    numels: tuple[int, ...]

    def version(self, fragment: int) -> int: ...


class Source(Box, Protocol):
    """What is sent; as FragmentBox."""

    def holds(self, fragment: int, version: int) -> bool: ...

    def payload_bytes(self, fragment: int, version: int) -> memoryview | None: ...

    def read_header(self, fragment: int) -> tuple[int, bytes] | None: ...

    def pin(self, fragment: int, version: int) -> bool: ...

    def unpin(self, fragment: int) -> None: ...


class Destination(Box, Protocol):
    """What is filled; as FragmentBox."""

    def begin_bytes(self, fragment: int) -> memoryview | None: ...

    def commit(self, fragment: int, version: int, meta: bytes) -> None: ...


B = TypeVar("B", bound=Box)


class _Chain(Generic[B]):
    def __init__(self, boxes: Sequence[B]) -> None:
        self.path = boxes[0].path
        self.numels = tuple(numel for box in boxes for numel in box.numels)
        self._places = [(box, fragment) for box in boxes for fragment in range(len(box.numels))]

    def version(self, fragment: int) -> int:
        """See Box."""
        box, inner = self._places[fragment]
        return box.version(inner)


class SourceChain(_Chain[Source]):
    """Several boxes as one that is sent."""

    def holds(self, fragment: int, version: int) -> bool:
        """See Source."""
        box, inner = self._places[fragment]
        return box.holds(inner, version)

    def payload_bytes(self, fragment: int, version: int) -> memoryview | None:
        """See Source."""
        box, inner = self._places[fragment]
        return box.payload_bytes(inner, version)

    def read_header(self, fragment: int) -> tuple[int, bytes] | None:
        """See Source."""
        box, inner = self._places[fragment]
        return box.read_header(inner)

    def pin(self, fragment: int, version: int) -> bool:
        """See Source."""
        box, inner = self._places[fragment]
        return box.pin(inner, version)

    def unpin(self, fragment: int) -> None:
        """See Source."""
        box, inner = self._places[fragment]
        box.unpin(inner)


class DestinationChain(_Chain[Destination]):
    """Several boxes as one that is filled."""

    def begin_bytes(self, fragment: int) -> memoryview | None:
        """See Destination."""
        box, inner = self._places[fragment]
        return box.begin_bytes(inner)

    def commit(self, fragment: int, version: int, meta: bytes) -> None:
        """See Destination."""
        box, inner = self._places[fragment]
        box.commit(inner, version, meta)
