"""Record: the newest whole value, whatever happens to its writer."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_ds.errors import UserError
from diloco_ds.exchange import record as record_module
from diloco_ds.exchange.record import Record


def test_newest_value_is_read(tmp_path):
    record = Record.create(tmp_path / "r", 100)
    reader = Record.open(tmp_path / "r")
    assert reader.sequence() == 0
    assert reader.read() is None
    for n, payload in enumerate([b"", b"one", b"x" * 100, b"short"], start=1):
        assert record.write(payload) == n
        assert reader.sequence() == n
        assert reader.read() == (n, payload)


def test_a_new_writer_goes_on_counting(tmp_path):
    Record.create(tmp_path / "r", 100).write(b"one")
    again = Record.open(tmp_path / "r")
    assert again.write(b"two") == 2
    assert again.read() == (2, b"two")


def test_too_long_a_value_changes_nothing(tmp_path):
    record = Record.create(tmp_path / "r", 3)
    record.write(b"abc")
    with pytest.raises(ValueError, match="4 bytes do not fit"):
        record.write(b"abcd")
    assert record.read() == (1, b"abc")


def test_never_overwrites_and_never_opens_something_else(tmp_path):
    Record.create(tmp_path / "r", 3)
    with pytest.raises(FileExistsError):
        Record.create(tmp_path / "r", 3)
    with pytest.raises(FileNotFoundError):
        Record.open(tmp_path / "none")
    for junk in (b"", b"junk", bytes(4096), (tmp_path / "r").read_bytes() + bytes(4096)):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(UserError, match="junk"):
            Record.open(tmp_path / "junk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junk", "r"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("record.invalidated", b"two"), ("record.filled", b"two"), ("record.written", b"three")],
)
def test_death_within_a_write(tmp_path, dies_at, place, expected):
    record = Record.create(tmp_path / "r", 100)
    record.write(b"one")
    record.write(b"two")
    dies_at(place, lambda: record.write(b"three"))
    survivor = Record.open(tmp_path / "r")
    sequence, payload = survivor.read()
    assert payload == expected
    assert sequence == survivor.sequence() == (3 if expected == b"three" else 2)
    assert survivor.write(b"four") == sequence + 1
    assert survivor.read() == (sequence + 1, b"four")


class _Death(Exception):
    pass


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(old=st.binary(max_size=40), new=st.binary(max_size=40), share=st.floats(0, 1))
def test_death_at_any_byte_of_the_payload(tmp_path, monkeypatch, old, new, share):
    (tmp_path / "r").unlink(missing_ok=True)
    record = Record.create(tmp_path / "r", 40)
    record.write(b"first")
    record.write(old)

    def die(place):
        raise _Death

    with monkeypatch.context() as patch:
        patch.setattr(record_module, "failpoint", die)
        with pytest.raises(_Death):
            record.write(new)
    slot = record._slot_starts[3 % 2] + record_module._SLOT_HEADER
    part = new[: int(share * len(new))]
    record._mapping[slot : slot + len(part)] = part
    assert Record.open(tmp_path / "r").read() == (2, old)


def test_a_damaged_slot_is_not_believed(tmp_path):
    record = Record.create(tmp_path / "r", 40)
    record.write(b"one")
    record.write(b"two")
    record._mapping[record._slot_starts[0] + record_module._SLOT_HEADER] ^= 1
    assert record.read() == (1, b"one")


def _value(n: int) -> bytes:
    return n.to_bytes(8, "little") * (1 + n % 500)


@pytest.mark.slow
def test_a_writer_killed_at_random_moments(tmp_path, killed_when):
    record = Record.create(tmp_path / "r", 4096)
    chance = random.Random(1)

    def write_for_ever():
        while True:
            record.write(_value(record.sequence() + 1))

    for _ in range(30):
        goal = record.sequence() + chance.randrange(1, 2000)
        killed_when(lambda goal=goal: record.sequence() >= goal, write_for_ever)
        sequence, payload = Record.open(tmp_path / "r").read()
        assert sequence >= goal
        assert payload == _value(sequence)


def test_a_reader_beside_a_fast_writer(tmp_path, in_child):
    record = Record.create(tmp_path / "r", 4096)

    def write_many():
        for n in range(1, 30_001):
            record.write(_value(n))

    join = in_child(write_many)
    seen = 0
    while seen < 30_000:
        newest = record.read()
        if newest is not None:
            sequence, payload = newest
            assert sequence >= seen
            assert payload == _value(sequence)
            seen = sequence
    join()
