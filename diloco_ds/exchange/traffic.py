"""What a link has carried and refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass
class Traffic:
    """Counters of one end of a link since it started. What is numbered `moments_from` or above is no fragment, but a portion
    of an optimizer's moments.
    """

    records_sent: int = 0
    records_received: int = 0
    fragments_sent: int = 0
    fragments_received: int = 0
    bytes_sent: int = 0  # of whole fragments
    bytes_received: int = 0
    moments_sent: int = 0  # portions
    moments_received: int = 0
    torn: int = 0  # transfers given up because a newer version came
    dropped: int = 0  # foreign or malformed messages
    moments_from: float = float("inf")
    _said: set[str] = field(default_factory=set)

    def sent(self, fragment: int, nbytes: int) -> None:
        """All of it has gone."""
        if fragment >= self.moments_from:
            self.moments_sent += 1
        else:
            self.fragments_sent += 1
            self.bytes_sent += nbytes

    def received(self, fragment: int, nbytes: int) -> None:
        """All of it is here."""
        if fragment >= self.moments_from:
            self.moments_received += 1
        else:
            self.fragments_received += 1
            self.bytes_received += nbytes

    def drop(self, reason: str) -> None:
        """Count a refused message; each reason is said once."""
        self.dropped += 1
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("dropped a message: %s (said once)", reason)

    def counters(self) -> dict[str, int]:
        """The counters by name, for the status file."""
        named = vars(self).items()
        return {name: value for name, value in named if isinstance(value, int) and name != "moments_from"}
