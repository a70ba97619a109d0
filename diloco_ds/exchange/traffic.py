"""What a link has carried and refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass
class Traffic:
    """Counters of one end of a link since it started."""

    records_sent: int = 0
    records_received: int = 0
    fragments_sent: int = 0
    fragments_received: int = 0
    bytes_sent: int = 0  # of whole fragments
    bytes_received: int = 0
    torn: int = 0  # transfers given up because a newer version came
    dropped: int = 0  # foreign or malformed messages
    _said: set[str] = field(default_factory=set)

    def drop(self, reason: str) -> None:
        """Count a refused message; each reason is said once."""
        self.dropped += 1
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("dropped a message: %s (said once)", reason)

    def counters(self) -> dict[str, int]:
        """The counters by name, for the status file."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}
