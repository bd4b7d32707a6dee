"""Every kind of recorded line survives the way into a file and back, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator.codec import Blocks, CodecError, canonical, decode, encode
from autoscaling.simulator.recorded import (
    FORMAT,
    VERSION,
    DroppedLine,
    EndLine,
    FleetLine,
    GatewayLine,
    Header,
    Line,
    ReplicaLine,
    RequestLine,
    TickLine,
    from_text,
    to_text,
)
from policies.config import PolicyConfig, ScalingConfig
from policies.types import Decision, FleetView, GatewayReport, Histogram, ReplicaReport
from tests.examples import examples

numbers = st.integers() | st.floats()
"""A float field may hold a whole number: reports are made by code, not by this schema."""
texts = st.text(max_size=20)
histograms = st.builds(Histogram, st.lists(st.integers(), max_size=40).map(tuple), numbers) | st.builds(Histogram)
counts = st.dictionaries(texts, st.integers(), max_size=3)
blocks = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(Blocks)
changes = st.dictionaries(texts, st.none() | numbers, max_size=3)
values = st.dictionaries(texts, st.none() | st.integers() | st.floats() | texts, max_size=4)
st.register_type_strategy(Histogram, histograms)
st.register_type_strategy(Blocks, blocks)

replica_reports = st.builds(ReplicaReport, replica_id=texts, window_ms=numbers, busy_share=st.none() | numbers)
gateway_reports = st.builds(
    GatewayReport, failed=counts, routed=counts, predicted_prompt_tokens=counts, predicted_hit_tokens=counts
)
decisions = st.builds(
    Decision, before=changes, after=changes, inputs=values, predicted=st.dictionaries(texts, numbers, max_size=3)
)
configs = st.builds(PolicyConfig, scaling=st.builds(ScalingConfig, replicas_max=st.integers(1, 9), headroom=st.just(1)))
headers = st.builds(Header, format=st.just(FORMAT), version=st.just(VERSION), config=configs)
ticks = st.builds(TickLine, decisions=st.lists(decisions, max_size=2).map(tuple))
lines: st.SearchStrategy[Line] = st.one_of(
    headers,
    st.builds(RequestLine, ttft_ms=st.none() | numbers, e2e_ms=numbers),
    st.builds(ReplicaLine, report=replica_reports),
    st.builds(GatewayLine, report=gateway_reports),
    st.builds(FleetLine, view=st.builds(FleetView)),
    ticks,
    st.builds(DroppedLine),
    st.builds(EndLine),
)


@settings(max_examples=examples(150), deadline=None)
@given(lines)
def test_a_line_read_back_is_the_same_value_and_the_same_bytes(line: Line) -> None:
    text = to_text(line)
    assert "\n" not in text
    again = from_text(text)
    assert type(again) is type(line)
    assert to_text(again) == text
    assert canonical(again) == canonical(line)
    assert repr(again) == repr(line)  # equality would call NaN different from itself


@settings(max_examples=examples(60), deadline=None)
@given(lines, st.data())
def test_a_line_without_one_of_its_fields_or_with_one_more_is_refused(line: Line, data: st.DataObject) -> None:
    plain = json.loads(to_text(line))
    fields = sorted(plain.keys() - {"kind"})
    if fields and (name := data.draw(st.sampled_from(fields))) != "config":
        with pytest.raises(CodecError, match=name if name not in {"format", "version"} else "cannot be read"):
            from_text(json.dumps({k: v for k, v in plain.items() if k != name}))
    with pytest.raises(CodecError, match="stranger"):
        from_text(json.dumps({**plain, "stranger": 1}))


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from([ReplicaReport, GatewayReport, FleetView, Decision, Histogram, PolicyConfig]), json_values)
def test_whatever_stands_in_its_place_is_a_value_or_a_codec_error(kind: type[Any], plain: Any) -> None:
    try:
        value = decode(kind, plain)
    except CodecError:
        return
    assert canonical(decode(kind, encode(value))) == canonical(value)
