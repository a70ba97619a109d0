from diloco_ds.island.watch import HUNG, Restarts, StepRhythm


def stepped(rhythm, *times, first=1):
    """Feed one report with a new step at each time."""
    for number, time in enumerate(times, start=first):
        rhythm.observe(number, number, time)


def watched(rhythm, sequence, step, start, end):
    """Look at an unchanged report every second from `start` to `end`; the time at which it counts as hung, or
    None.
    """
    for time in range(start, end):
        rhythm.observe(sequence, step, float(time))
        if rhythm.hung(float(time)):
            return time
    return None


def test_a_learner_that_starts_may_take_any_time():
    rhythm = StepRhythm()
    assert watched(rhythm, 1, None, 0, 10_000) is None
    stepped(rhythm, 10_000.0, first=2)  # its first step, then compiling for the second
    assert watched(rhythm, 2, 2, 10_001, 20_000) is None


def test_silence_is_measured_by_the_learners_own_steps():
    fast = StepRhythm()
    stepped(fast, 0.0, 0.5, 1.0, 1.5)
    assert watched(fast, 4, 4, 2, 200) == 32  # 30 s of silence at least
    slow = StepRhythm()
    stepped(slow, 0.0, 4.0, 8.0)
    assert watched(slow, 3, 3, 9, 200) == 89  # 20 times 4 s


def test_reports_written_while_busy_end_the_silence_and_are_no_steps():
    rhythm = StepRhythm()
    stepped(rhythm, 0.0, 1.0, 2.0)
    sequence = 3
    for time in range(3, 303):  # saving for five minutes: reports without steps
        sequence += 1
        rhythm.observe(sequence, 3, float(time))
        assert rhythm.hung(float(time)) is None
    stepped(rhythm, 303.0, 304.0, first=400)
    assert watched(rhythm, 401, 401, 305, 500) == 335  # the five minutes did not become its rhythm


def test_a_watcher_that_was_away_counts_anew():
    rhythm = StepRhythm()
    stepped(rhythm, 0.0, 1.0, 2.0)
    rhythm.observe(3, 3, 1000.0)
    assert rhythm.hung(1000.0) is None
    assert watched(rhythm, 3, 3, 1001, 1100) == 1031


def test_the_reason_is_in_words():
    rhythm = StepRhythm()
    stepped(rhythm, 0.0, 1.0)
    assert watched(rhythm, 2, 2, 2, 60) == 32
    assert (
        rhythm.hung(32.0) == "hung: no step for 31 s, allowed are 30 s (its longest recent step took 1.0 s)"
    )


def test_delays_double_up_to_the_longest_and_fall_back_after_a_good_run():
    restarts = Restarts()
    assert [restarts.ended(5.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.ended(10.0) == 0
    assert [restarts.ended(5.0) for _ in range(3)] == [1, 2, 4]
    assert restarts.count == 11


def test_it_gives_up_after_ten_ends_in_a_row_without_a_step():
    restarts = Restarts()
    assert all(restarts.ended(None) is not None for _ in range(9))
    assert restarts.ended(0.5) is not None  # one step, and the count begins again
    assert all(restarts.ended(None) is not None for _ in range(9))
    assert restarts.ended(None) is None
    assert restarts.barren == 10


def test_the_same_error_three_times_before_a_step_is_enough():
    restarts = Restarts()
    assert restarts.ended(None, "no such optimizer") is not None
    assert restarts.ended(None, "no such optimizer") is not None
    assert restarts.ended(None, "no such optimizer") is None
    patient = Restarts()
    errors = ["port taken", "port taken", None, "port taken", "port taken", "another"]
    assert all(patient.ended(None, error) is not None for error in errors)
    assert patient.ended(3.0, "another") is not None
    assert patient.ended(3.0, "another") is not None  # it makes steps


def test_the_same_failure_again_and_again_is_given_up_unless_it_gets_further():
    restarts = Restarts()
    assert all(restarts.ended(60.0, "no memory", 100) == 0 for _ in range(9))
    assert restarts.ended(60.0, "no memory", 101) == 0  # a step further: it counts anew
    assert all(restarts.ended(60.0, "no memory", 90) == 0 for _ in range(8))
    assert restarts.ended(60.0, "no memory", 101) is None
    assert restarts.why() == "10 times in a row the same failure, and no step beyond 101"


def test_being_killed_is_no_failure_of_its_own():
    restarts = Restarts()
    assert all(restarts.ended(60.0, None, 100) == 0 for _ in range(100))
    assert all(restarts.ended(60.0, HUNG, 100) == 0 for _ in range(9))
    assert restarts.ended(60.0, None, 100) == 0  # killed in between
    assert all(restarts.ended(60.0, HUNG, 100) == 0 for _ in range(9))
    assert restarts.ended(60.0, HUNG, 100) is None


def test_an_error_after_steps_is_none_of_the_three_starts():
    restarts = Restarts()
    assert restarts.ended(3.0, "no memory", 10) is not None
    assert restarts.ended(None, "no memory") is not None
    assert restarts.ended(None, "no memory") is not None
    assert restarts.ended(None, "no memory") is None
    assert restarts.why() == "3 starts in a row without a step"


def test_the_reason_to_give_up_is_the_row_that_was_full():
    restarts = Restarts()
    assert all(restarts.ended(60.0, "no memory", 100) == 0 for _ in range(9))
    assert restarts.ended(None, "no memory") is None
    assert restarts.why() == "10 times in a row the same failure, and no step beyond 100"
