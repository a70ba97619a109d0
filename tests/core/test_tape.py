import io
import json
import math
from array import array
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.core import events, tape
from diloco_ds.core.tape import Entry, Header, TapeError, Torn, decode_all, encode, encode_header

HEADER = Header("run-7", "ab12", 1, {"version": [0, 3], "merged_tokens": 12}, threads=3)
ENTRIES = (
    Entry(0.1, events.Joined("a")),
    Entry(0.2, events.Report("a", 1, "running", 3, 96, 0.25, (3, 1), (96, 32), (0, 2))),
    Entry(0.2, events.Want("a", 1, 3, "ready")),
    Entry(
        1 / 3,
        events.Merge(1, 3, 3, (events.Part("a", 5, 2, 1, 32, 1.0, False),), 44, ("b",), 0.4, "1 of 1: 'ä'\n"),
    ),
)


def taped(*records):
    return b"".join(
        encode_header(record) if isinstance(record, Header) else encode(record.at, record.value)
        for record in records
    )


def read(data, **expected):
    return list(decode_all(io.BytesIO(data), **expected))


TAPE = taped(HEADER, *ENTRIES)
STARTS = [0, *(i + 1 for i, byte in enumerate(TAPE) if byte == 10)]

PLAIN = {
    "int": st.integers(-(2**63), 2**63),
    "float": st.floats(allow_nan=False),
    "str": st.text(),
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(st.text(), max_size=3).map(tuple),
    "Sequence[int]": st.lists(st.integers(-1, 2**50)).map(tuple),
    "LearnerPhase": st.sampled_from(get_args(events.LearnerPhase)),
    "RunPhase": st.sampled_from(get_args(events.RunPhase)),
}


def any_of(cls):
    values = {
        each.name: st.lists(any_of(events.Part), max_size=3).map(tuple)
        if each.type == "tuple[Part, ...]"
        else PLAIN[each.type]
        for each in fields(cls)
    }
    return st.builds(cls, **values)


KINDS = (*get_args(events.Event), *get_args(events.Action))
ANY_ENTRY = st.builds(Entry, st.floats(0, 1e9), st.one_of([any_of(cls) for cls in KINDS]))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(st.data())
def test_every_kind_is_read_back_as_it_was(cls, data):
    entry = Entry(data.draw(st.floats(0, 1e9)), data.draw(any_of(cls)))
    assert read(taped(HEADER, entry)) == [HEADER, entry]
    assert entry.is_event == (cls in get_args(events.Event))


@settings(max_examples=30)
@given(st.lists(ANY_ENTRY, max_size=8), st.lists(ANY_ENTRY, max_size=8))
def test_a_tape_of_two_generations(first, second):
    records = [HEADER, *first, Header("run-7", "ab12", 2), *second]
    assert read(taped(*records), run_id="run-7", layout_digest="ab12") == records


def test_a_record_is_one_line_of_json():
    lines = TAPE.decode("ascii").splitlines()
    assert len(lines) == 1 + len(ENTRIES)
    assert json.loads(lines[2])["value"]["island"] == "a"
    assert json.loads(lines[4])["value"]["parts"][0]["weight"] == 1.0


def test_other_sequences_and_odd_floats_are_kept():
    report = events.Report("a", 1, "running", 3, 96, math.inf, array("q", [3, 1]), [96, 32], (0, 2))
    (_, entry) = read(taped(HEADER, Entry(0.0, report)))
    assert entry.value.step_time == math.inf
    assert (entry.value.c_steps, entry.value.c_tokens, entry.value.base) == ((3, 1), (96, 32), (0, 2))


def test_every_truncation_gives_the_whole_records_and_says_where_it_was_torn():
    records = [HEADER, *ENTRIES]
    for size in range(len(TAPE) + 1):
        whole = sum(end <= size for end in STARTS[1:])
        expected = records[:whole]
        if size > STARTS[whole]:
            expected = [*expected, Torn(STARTS[whole], size - STARTS[whole])]
        assert read(TAPE[:size]) == expected


def test_every_flipped_bit_is_found_and_named():
    for position in range(len(TAPE)):
        number = sum(start <= position for start in STARTS)
        for bit in range(8):
            data = bytearray(TAPE)
            data[position] ^= 1 << bit
            if position == len(TAPE) - 1:  # the last newline: the record is not whole any more
                assert read(bytes(data))[-1] == Torn(STARTS[-2], len(TAPE) - STARTS[-2])
                continue
            with pytest.raises(TapeError, match=f"record {number} at byte {STARTS[number - 1]}: damaged"):
                read(bytes(data))


def test_what_stands_before_a_damaged_record_is_read():
    data = bytearray(TAPE)
    data[STARTS[3] + 4] ^= 1
    records = decode_all(io.BytesIO(bytes(data)))
    assert [next(records) for _ in range(3)] == [HEADER, *ENTRIES[:2]]
    with pytest.raises(TapeError, match="record 4"):
        next(records)


def test_an_appended_record_after_a_torn_one_is_found():
    with pytest.raises(TapeError, match=f"record 5 at byte {STARTS[4]}: damaged"):
        read(TAPE[:-9] + taped(Header("run-7", "ab12", 2)))


@pytest.mark.parametrize(
    ("records", "expected", "says"),
    [
        ([*ENTRIES], {}, "record 1 at byte 0: a tape begins with a header"),
        ([HEADER], {"run_id": "run-8"}, "of run run-7, not of run-8"),
        ([HEADER], {"layout_digest": "cd34"}, "of fragment layout ab12, not of cd34"),
        ([HEADER, Header("run-8", "ab12", 2)], {}, "record 2 .* of run run-8, not of run-7"),
        ([HEADER, Header("run-7", "cd34", 2)], {}, "record 2 .* layout cd34, not of ab12"),
        ([HEADER, HEADER], {}, "generation 1 follows generation 1"),
    ],
)
def test_another_run_layout_or_order_is_refused(records, expected, says):
    with pytest.raises(TapeError, match=says):
        read(taped(*records), **expected)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(tape, "VERSION", 9)
    data = taped(HEADER)
    monkeypatch.undo()
    with pytest.raises(TapeError, match="a tape of format 9, this program reads format 4"):
        read(data)


def test_an_unknown_kind_is_refused():
    class Other(events.Tick):
        pass

    with pytest.raises(TapeError, match=r"record 2 .* unknown kind 'Other'"):
        read(taped(HEADER, Entry(0.0, Other())))


def test_an_empty_tape_holds_nothing():
    assert read(b"") == []
