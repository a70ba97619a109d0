"""The adaptive grace window (Eq. 3 of the paper): how long a merge may wait for more learners at no cost to anybody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MovingAverage:
    """Exponential moving average; None until the first sample. `smoothing`: the newest sample's weight, 0..1."""

    smoothing: float
    value: float | None = None

    def add(self, sample: float) -> None:
        """Take in one sample."""
        if self.value is None:
            self.value = sample
        else:
            self.value += self.smoothing * (sample - self.value)


def grace_window(
    *, safety: float, overlap: int, step_time: float, quorum_time: float, sync_time: float
) -> float:
    """Seconds to wait after the quorum has answered:
    xi_grace = min(gamma * max(tau * xi_step - (xi_quorum + xi_sync), 0), xi_step).

    safety: gamma, 0..1. overlap: tau, inner steps. step_time: xi_step, seconds of the slowest admitted learner's
    inner step. quorum_time: xi_quorum, seconds from the opening of the round to its quorum. sync_time: xi_sync, seconds
    of merge, outer step and broadcast. Source: Eq. 3 of the paper; the bound of one inner step is its text's.
    """
    slack = overlap * step_time - (quorum_time + sync_time)
    return min(safety * max(slack, 0.0), step_time)
