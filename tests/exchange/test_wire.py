"""Messages: what was packed comes back, and nothing else passes for it."""

from __future__ import annotations

import dataclasses
import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.core.events import Answer, Gift, Orders, Peer, Report
from diloco_ds.exchange.link_messages import Accept, Hello, Offer, Taken, Value, unpack_link_message
from diloco_ds.exchange.wire import (
    MomentsHeader,
    OrdersRecord,
    ReportRecord,
    ThetaHeader,
    UpdateHeader,
    WireError,
)

ints = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=20)
floats = st.floats(allow_nan=False)


def int_lists(size):
    return st.lists(ints, min_size=size, max_size=size).map(tuple)


def reports(size):
    return st.builds(
        Report,
        island=names,
        incarnation=ints,
        phase=st.sampled_from(["starting", "running", "drained", "stopped"]),
        step=ints,
        tokens=ints,
        step_time=floats,
        c_steps=int_lists(size),
        c_tokens=int_lists(size),
        base=int_lists(size),
        lease=ints,
        cursor=ints,
        reserve=ints,
        step_blocks=ints,
        gives=ints,
        asks=ints,
        portion=ints,
    )


messages = st.one_of(
    st.integers(0, 5).flatmap(
        lambda size: st.builds(
            ReportRecord,
            run_id=names,
            layout_digest=names,
            report=reports(size),
            loss=floats,
            tokens_per_s=floats,
            lr_tokens=ints,
        )
    ),
    st.builds(
        OrdersRecord,
        run_id=names,
        generation=ints,
        orders=st.builds(
            Orders,
            phase=st.sampled_from(["run", "drain", "stop", "finished"]),
            global_step=ints,
            global_tokens=ints,
            want=int_lists(3),
            reader=ints,
            leases=int_lists(6),
            peer=st.builds(Peer, ints, names, ints, floats, int_lists(3), names),
            gift=st.builds(Gift, names, ints, ints, ints, int_lists(3)),
        ),
    ),
    st.builds(
        UpdateHeader,
        names,
        names,
        *[ints] * (len(dataclasses.fields(UpdateHeader)) - 3),
        expert_tokens=int_lists(4),
    ),
    st.builds(
        MomentsHeader,
        names,
        names,
        ints,
        names,
        *[ints] * 4,
        int_lists(3),
        names,
    ),
    st.builds(ThetaHeader, names, ints, ints, st.binary(max_size=30)),
    st.builds(Hello, names, names, int_lists(2), ints, int_lists(2)),
    st.builds(Value, st.binary(max_size=30)),
    st.builds(Taken),
    st.builds(Offer, ints, ints, st.binary(max_size=30)),
    st.builds(Accept, ints, ints),
)


@given(messages)
def test_round_trip(message):
    assert type(message).unpack(message.pack()) == message


@settings(max_examples=40)
@given(messages)
def test_every_truncation_is_refused(message):
    data = message.pack()
    for length in range(len(data)):
        with pytest.raises(WireError):
            type(message).unpack(data[:length])
    with pytest.raises(WireError):
        type(message).unpack(data + b"\0")


@settings(max_examples=40)
@given(messages)
def test_every_bit_flip_is_refused(message):
    data = message.pack()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            type(message).unpack(bytes(flipped))


@settings(max_examples=300)
@given(messages, st.binary(max_size=80), st.data())
def test_a_wrong_body_with_a_right_checksum(message, noise, data):
    """Whatever decodes is exactly what the bytes say; the rest is refused."""
    packed = message.pack()
    body = bytearray(packed[12:-4])
    at = data.draw(st.integers(0, len(body)))
    body[at : at + len(noise)] = noise
    head = packed[:8] + len(body).to_bytes(4, "little")
    forged = head + body + zlib.crc32(head + body).to_bytes(4, "little")
    try:
        decoded = type(message).unpack(forged)
    except WireError:
        return
    assert decoded.pack() == forged


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for kind in (ReportRecord, OrdersRecord, UpdateHeader, ThetaHeader):
        with pytest.raises(WireError):
            kind.unpack(noise)
    with pytest.raises(WireError):
        unpack_link_message(noise)


@given(messages, messages)
def test_one_message_does_not_pass_for_another(one, other):
    if type(one) is not type(other):
        with pytest.raises(WireError):
            type(other).unpack(one.pack())


REPORT = Report("a", 1, "running", 10, 1000, 0.5, (1, 2), (100, 200), (0, -1))
RECORD = ReportRecord("run", "layout", REPORT, math.nan, 0.0, 8)


def test_a_loss_that_is_not_a_number_travels():
    again = ReportRecord.unpack(RECORD.pack())
    assert math.isnan(again.loss)
    assert again.report == REPORT


@pytest.mark.parametrize(
    "report",
    [
        dataclasses.replace(REPORT, phase="dancing"),
        dataclasses.replace(REPORT, c_steps=(1, 2, 3)),
        dataclasses.replace(REPORT, tokens=2**63),
        dataclasses.replace(REPORT, step=1.5),
        dataclasses.replace(REPORT, island=None),
        dataclasses.replace(REPORT, base=(0, "x")),
    ],
)
def test_what_does_not_fit_is_not_packed(report):
    with pytest.raises(WireError):
        dataclasses.replace(RECORD, report=report).pack()


def test_a_list_is_packed_like_a_tuple():
    listed = dataclasses.replace(RECORD, report=dataclasses.replace(REPORT, c_steps=[1, 2]))
    assert listed.pack() == RECORD.pack()


def test_an_update_becomes_an_answer():
    shared = {
        "island": "a",
        "incarnation": 1,
        "fragment": 2,
        "round": 3,
        "base": 4,
        "steps": 5,
        "tokens": 6,
        "update_id": 7,
        "lease": 8,
        "cursor": 9,
        "expert_tokens": (10, 11),
    }
    assert UpdateHeader(run_id="run", numel=10, **shared).to_answer() == Answer(**shared)


def test_link_messages_are_told_apart():
    for message in (Value(b"x"), Taken(), Offer(1, 2, b"m"), Accept(1, 2), Hello("r", "l", (1,), -1, (-1,))):
        assert unpack_link_message(message.pack()) == message
    with pytest.raises(WireError, match="does not belong here"):
        unpack_link_message(RECORD.pack())
