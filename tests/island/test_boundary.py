import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.config import Adoption
from diloco_ds.core.reading import PIECES
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.island.boundary import Adopt, Boundary, Decision, Then, encoded_size
from diloco_ds.island.completion import Completion, RankBoard
from diloco_ds.island.timing import Laps

adoptions = st.dictionaries(
    st.integers(0, 5), st.builds(Adopt, st.integers(0, 2**62), st.none() | st.integers(0, 2**62))
)


@given(
    st.sampled_from(Then),
    st.booleans(),
    st.integers(0, 2**40),
    st.integers(0, 2**62),
    adoptions,
    st.sets(st.integers(0, 5)),
    st.integers(-1, 2**20),
    st.lists(st.tuples(st.integers(-(2**60), 2**60), st.integers(1, 99)), max_size=PIECES),
)
def test_a_decision_travels_as_integers(then, save, step, lr_tokens, adopt, answer, give_, read):
    decision = Decision(then, save, step, lr_tokens, adopt, tuple(sorted(answer)), give_, tuple(read))
    values = decision.encode(6)
    assert len(values) == encoded_size(6)
    assert Decision.decode([int(value) for value in values]) == decision


class Copy:
    """A transfer that the test ends."""

    def __init__(self):
        self.ended = threading.Event()

    def done(self):
        return self.ended.is_set()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_boundary_is_finished_when_the_copies_of_all_ranks_are_done(tmp_path):
    path = tmp_path / "ranks"
    first, second = Completion(RankBoard.renew(path, 2), 0), Completion(RankBoard(path), 1)
    copies, finished = [Copy(), Copy(), Copy(), Copy()], []
    first.boundary(copies[:1], lambda: finished.append(1))
    second.boundary(copies[1:2], None)
    first.boundary(copies[2:3], lambda: finished.append(2))
    second.boundary(copies[3:], None)
    copies[2].ended.set()
    copies[3].ended.set()
    copies[0].ended.set()
    assert finished == []
    copies[1].ended.set()
    wait_for(lambda: len(finished) == 2)
    first.close()
    second.close()
    assert finished == [1, 2]


def test_one_rank_whose_copies_are_done_needs_no_thread(tmp_path):
    completion, done, finished = Completion(RankBoard.renew(tmp_path / "ranks", 1), 0), Copy(), []
    done.ended.set()
    completion.boundary([done], lambda: finished.append(threading.current_thread()))
    assert finished == [threading.current_thread()]
    completion.close()


def test_what_goes_wrong_in_the_thread_reaches_the_loop(tmp_path):
    completion, copy = Completion(RankBoard.renew(tmp_path / "ranks", 1), 0), Copy()
    completion.boundary([copy], lambda: 1 / 0)
    copy.ended.set()
    with pytest.raises(RuntimeError, match="could not be completed"):
        completion.wait()


class OneRank:
    """An island of one rank whose fragments are plain tensors."""

    rank, world_size = 0, 1

    def __init__(self, fragments):
        self.fragments = fragments

    def write_fragment(self, fragment, out):
        out.copy_(self.fragments[fragment])
        return self._copied()

    def write_moments(self, portion, out):
        out.fill_(portion)
        return self._copied()

    def adopt_fragment(self, fragment, source, how, alpha, snapshot):
        own = self.fragments[fragment]
        new = {
            "overwrite": lambda: source,
            "mix": lambda: alpha * own + (1 - alpha) * source,
            "rebase": lambda: source + own - snapshot,
        }[how]()
        self.fragments[fragment] = new.clone()
        return self._copied()

    def _copied(self):
        copy = Copy()
        copy.ended.set()
        return copy


@pytest.fixture
def boxes(tmp_path):
    inbox, outbox = (FragmentBox.create(tmp_path / name, [2, 3], 64) for name in ("inbox", "outbox"))
    given_ = FragmentBox.create(tmp_path / "given", [4], 64)
    inbox.begin(0).copy_(torch.tensor([10.0, 20.0]))
    inbox.commit(0, 4, b"")
    outbox.begin(0).copy_(torch.tensor([1.0, 1.0]))
    outbox.commit(0, 7, b"")
    return inbox, outbox, given_


def crossed(boxes, tmp_path, decision, **adoption):
    ranks = OneRank([torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])])
    completion = Completion(RankBoard.renew(tmp_path / "ranks", 1), 0)
    boundary, finished = Boundary(ranks, *boxes, completion, Adoption(**adoption), Laps()), []
    boundary.carry_out(boundary.agree(decision), lambda: finished.append(True))
    completion.close()
    return ranks.fragments, finished


def test_a_fragment_that_is_wanted_and_replaced_is_sent_as_it_was(boxes, tmp_path):
    boxes[1].begin(0)
    boxes[1].begin(1)
    fragments, finished = crossed(boxes, tmp_path, Decision(Then.STEP, False, 9, 0, {0: Adopt(4)}, (0, 1)))
    assert fragments[0].tolist() == [10, 20]
    assert boxes[1].begun(0).tolist() == [3, 5]
    assert boxes[1].begun(1).tolist() == [1, 2, 3]
    assert finished == [True]


@pytest.mark.parametrize(
    ("adoption", "snapshot", "becomes"),
    [
        ({"how": "overwrite"}, 7, [10, 20]),
        ({"how": "mix", "alpha": 0.25}, 7, [8.25, 16.25]),
        ({"how": "rebase"}, 7, [12, 24]),
        ({"how": "rebase"}, None, [10, 20]),
    ],
)
def test_the_ways_to_adopt(boxes, tmp_path, adoption, snapshot, becomes):
    fragments, _ = crossed(
        boxes, tmp_path, Decision(Then.STEP, False, 9, 0, {0: Adopt(4, snapshot)}), **adoption
    )
    assert fragments[0].tolist() == becomes


def test_a_portion_of_the_moments_is_given(boxes, tmp_path):
    boxes[2].begin(0)
    _, finished = crossed(boxes, tmp_path, Decision(Then.STEP, False, 9, 0, give=3))
    assert boxes[2].begun(0).tolist() == [3, 3, 3, 3]
    assert finished == [True]


def test_a_boundary_without_copies_finishes_nothing(boxes, tmp_path):
    _, finished = crossed(boxes, tmp_path, Decision(Then.STEP, False, 9, 0))
    assert finished == []
