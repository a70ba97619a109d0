"""Who was in the merge of a step, who was not, and why: in words, from the tape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diloco_ds.core.events import Answer, Drop, Keep, Merge, Part, Skip, Want
from diloco_ds.core.syncer import Syncer
from diloco_ds.core.tape import Torn
from diloco_ds.errors import UserError
from diloco_ds.replay.decisions import Generation, Moment


@dataclass
class RoundStory:
    """One round of a step (a step has another one where a syncer was killed in it). Times: the generation's clock, s."""

    step: int
    generation: int
    fragment: int
    opened: float
    obstacles: dict[str, str | None]  # per island when it opened: why it was not asked
    asked: dict[str, float] = field(default_factory=dict)
    answered: dict[str, float] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)  # why an answer to this round was kept or dropped
    closed: float | None = None
    merge: Merge | None = None
    skip: Skip | None = None

    def sentences(self) -> Iterator[str]:
        """The story."""
        yield (
            f"step {self.step}, generation {self.generation}: a round of fragment {self.fragment}, "
            f"opened at {self.opened:.3f} s; {self._end()}"
        )
        parts = self.merge.parts if self.merge is not None else ()
        yield from (f"  in it: {_share(part)}" for part in parts)
        merged = {part.island for part in parts}
        islands = {**self.obstacles, **dict.fromkeys(self.asked)}
        yield from (f"  not in it: {self._absence(name)}" for name in islands if name not in merged)

    def _end(self) -> str:
        if self.merge is not None:
            return f"merged as version {self.merge.version} at {self.closed:.3f} s: {self.merge.reason}"
        if self.skip is not None:
            return f"skipped at {self.closed:.3f} s: {self.skip.reason}"
        return "neither merged nor skipped: the tape or its generation ends before"

    def _absence(self, island: str) -> str:
        if island not in self.asked:
            return f"{island} was not asked: {self.obstacles[island] or 'it could not answer'}"
        asked = f"{island}, asked at {self.asked[island]:.3f} s,"
        if island not in self.answered:
            return f"{asked} did not answer"
        after = self.answered[island] - (self.closed if self.closed is not None else self.answered[island])
        when = f"{after:.3f} s after the round was over" if after > 0 else f"at {self.answered[island]:.3f} s"
        return f"{asked} answered {when}: {self.fates.get(island, 'its answer waits for the merge')}"


class Explanation:
    """Collects the stories of one step along the tape."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stories: list[RoundStory] = []
        self._open: RoundStory | None = None
        self._newest = 0

    def take(self, moment: Generation | Moment | Torn, core: Syncer | None) -> None:
        """Follow the tape by one moment; `core` is as it is after it."""
        if isinstance(moment, Torn) or core is None:
            return
        if isinstance(moment, Generation):
            self._open, self._newest = None, core.global_step
            return
        if self._newest < self.step <= core.global_step:
            self._begin(moment, core)
        self._newest = core.global_step
        if self._open is not None:
            self._follow(self._open, moment)

    def lines(self) -> list[str]:
        """The stories; UserError if no round served the step."""
        if not self.stories:
            raise UserError(f"--explain: no round on the tape serves step {self.step}")
        return [line for story in self.stories for line in story.sentences()]

    def _begin(self, moment: Moment, core: Syncer) -> None:
        fragment = core.open_fragment(self.step)
        if fragment is None:  # a step that no fragment's turn is
            return
        story = RoundStory(self.step, moment.generation, fragment, moment.at, core.obstacles(fragment))
        if core.phase == "drain":  # the last rounds ask everybody for everything
            story.asked = dict.fromkeys(core.view().islands, moment.at)
        self._open = story
        self.stories.append(story)

    def _follow(self, story: RoundStory, moment: Moment) -> None:
        event = moment.event
        if isinstance(event, Answer) and event.round == self.step:
            story.answered.setdefault(event.island, moment.at)
        _note(story, moment.decided, moment.at, event)


def _note(story: RoundStory, actions: Iterable[object], at: float, event: object) -> None:
    for action in actions:
        match action:
            case Want(round=story.step):
                story.asked.setdefault(action.island, at)
            case Merge(round=story.step):
                story.merge, story.closed = action, at
            case Skip(round=story.step):
                story.skip, story.closed = action, at
            case Keep() | Drop() if isinstance(event, Answer) and event.round == story.step:
                if action.update_id == event.update_id:
                    story.fates[action.island] = action.reason


def _share(part: Part) -> str:
    late = ", kept from an earlier round" if part.late else ""
    return (
        f"{part.island} with weight {part.weight:.4f}: {part.steps} steps and {part.tokens} tokens "
        f"on version {part.base}{late}"
    )
