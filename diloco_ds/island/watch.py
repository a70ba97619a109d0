"""When a learner counts as hung, and when one that ended is started again: decisions only, no clock and no
process.
"""

from __future__ import annotations

from collections import deque

LEAST_SILENCE_S = 30.0
"""Below this nobody is called hung, however fast its steps are: a garbage collection, a slow disk."""
SILENCE_FACTOR = 20.0
"""A learner is hung when it is silent for this many times its longest recent step."""
UNWATCHED_S = 5.0
"""If the watcher itself was away for longer (stopped, suspended), it has not seen the silence and starts to
count anew.
"""


SAME_ERRORS = 3
"""So many starts that end with the same error before a step are enough."""
HUNG = "hung"
"""What failed in a learner that was found hung, where others have an error."""


class StepRhythm:
    """Finds a hung learner by its own rhythm of steps.

    Nothing is concluded before the learner has made two steps: starting, compiling and loading may take any
    time. A report that was written again without a new step (a learner that is busy saving writes one now and
    then) ends the silence, and the interval it falls in is not taken for a step.
    """

    def __init__(self, remembered: int = 50) -> None:
        self._intervals: deque[float] = deque(maxlen=remembered)
        self._sequence: int | None = None
        self._step: int | None = None
        self._stepped_at: float | None = None
        self._heard_at = self._looked_at = 0.0

    @property
    def stepping(self) -> bool:
        """True from the learner's second step on."""
        return bool(self._intervals)

    @property
    def step(self) -> int | None:
        """The newest step clock seen, None before there is one."""
        return self._step

    def observe(self, sequence: int, step: int | None, now: float) -> None:
        """Take in the report with `sequence` number and step clock `step` (None: not stepping yet), seen at
        `now` (seconds).
        """
        away = now - self._looked_at > UNWATCHED_S
        self._looked_at = now
        if away or sequence != self._sequence:
            self._heard_at = now
        if sequence != self._sequence and step is not None:
            self._take_step(step, now)
        self._sequence = sequence

    def _take_step(self, step: int, now: float) -> None:
        if step == self._step:  # written again without a step: what lies around it is no measure of a step
            self._stepped_at = None
            return
        if self._stepped_at is not None:
            self._intervals.append(now - self._stepped_at)
        self._step, self._stepped_at = step, now

    def hung(self, now: float) -> str | None:
        """Why the learner counts as hung at `now`, or None."""
        if not self.stepping:
            return None
        longest = max(self._intervals)
        limit = max(LEAST_SILENCE_S, SILENCE_FACTOR * longest)
        silence = now - self._heard_at
        if silence <= limit:
            return None
        allowed = f"allowed are {limit:.0f} s (its longest recent step took {longest:.1f} s)"
        return f"hung: no step for {silence:.0f} s, {allowed}"


class Restarts:
    """How long to wait before a learner that ended is started again, and when to give it up.

    One that was well for long enough is started again at once; from then on the delays double.
    """

    def __init__(
        self,
        shortest_s: float = 1.0,
        longest_s: float = 30.0,
        healthy_after_s: float = 10.0,
        give_up_after: int = 10,
    ) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._healthy_after_s = healthy_after_s
        self._give_up_after = give_up_after
        self._delay_s = shortest_s
        self.count = 0
        """Restarts so far."""
        self.barren = 0
        """Ends in a row without a single step before them."""
        self.stuck = 0
        """Ends in a row by the same failure, none of them at a later step than the ones before."""
        self._failure: str | None = None
        self._furthest: int | None = None  # step clock at the latest of those ends
        self._same_error = 0  # starts in a row that ended with it before a step

    def ended(
        self, stepped_for_s: float | None, failure: str | None = None, step: int | None = None
    ) -> float | None:
        """Seconds to wait before the next start, None = give up.

        `stepped_for_s`: how long it made steps, None = not one. `failure`: its error when it ended by itself, or
        `HUNG`; None if it was killed, which says nothing of the next start. `step`: its step clock at the end. The same
        error three times in a row before a step is one that starting again does not mend; nor is a failure that comes
        back again and again though the learner got no further.
        """
        self.barren = self.barren + 1 if stepped_for_s is None else 0
        self._count_failure(failure, step, stepped_for_s is not None)
        if max(self.barren, self.stuck) >= self._give_up_after or self._same_error >= SAME_ERRORS:
            return None
        if stepped_for_s is not None and stepped_for_s >= self._healthy_after_s:
            self._delay_s = 0.0
        delay = self._delay_s
        self._delay_s = min(max(2 * delay, self._shortest_s), self._longest_s)
        self.count += 1
        return delay

    def why(self) -> str:
        """Why it was given up, in words."""
        if self.stuck >= self._give_up_after and self._furthest is not None:
            return f"{self.stuck} times in a row the same failure, and no step beyond {self._furthest}"
        return f"{self.barren} starts in a row without a step"

    def _count_failure(self, failure: str | None, step: int | None, stepped: bool) -> None:
        again = failure is not None and failure == self._failure
        further = step is not None and (self._furthest is None or step > self._furthest)
        self._same_error = 0 if stepped else self._same_error + 1 if again else 1
        self.stuck = self.stuck + 1 if again and not further else int(failure is not None)
        self._furthest = step if further or not again else self._furthest
        self._failure = failure
