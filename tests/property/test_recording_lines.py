"""Every kind of recorded line survives the way into a file and back, whatever is in it."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, TypeVar

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
from policies.measures import ClassCounts, DepthUse, GpuReading, Roofline, TenantCounts
from policies.steering import Alternative, Override
from policies.types import (
    Decision,
    FleetView,
    GatewayReport,
    Histogram,
    Knobs,
    ReplicaReport,
    StepCoefficients,
)
from tests.examples import examples

T = TypeVar("T")

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


def whole(kind: type[T], **given_fields: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Values of a dataclass with every field drawn, those with defaults as well."""
    hints = typing.get_type_hints(kind)
    drawn = {f.name: given_fields.get(f.name, st.from_type(hints[f.name])) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return st.builds(kind, **drawn)


st.register_type_strategy(float, numbers)
by_class = st.dictionaries(texts, whole(ClassCounts), max_size=3)
by_tenant = st.dictionaries(texts, whole(TenantCounts), max_size=3)
overrides = st.lists(whole(Override), max_size=2).map(tuple)
replica_reports = whole(
    ReplicaReport,
    depth_use=st.lists(whole(DepthUse), max_size=2).map(tuple),
    gpu=st.none() | whole(GpuReading, throttle=st.lists(texts, max_size=3).map(tuple)),
    roofline=st.none() | whole(Roofline),
    step_model=st.none() | whole(StepCoefficients),
    knobs=whole(Knobs),
)
gateway_reports = whole(
    GatewayReport, failed=counts, routed=counts, predicted_prompt_tokens=counts, predicted_hit_tokens=counts,
    by_class=by_class, by_tenant=by_tenant, ejected=st.dictionaries(texts, texts, max_size=3), overrides=overrides,
)  # fmt: skip
figures = st.dictionaries(texts, numbers, max_size=3)
alternatives = st.lists(whole(Alternative, predicted=figures), max_size=2).map(tuple)
decisions = whole(
    Decision, before=changes, after=changes, inputs=values, predicted=figures, realised=figures,
    alternatives=alternatives, conditions=st.lists(texts, max_size=2).map(tuple),
)  # fmt: skip
configs = st.builds(PolicyConfig, scaling=st.builds(ScalingConfig, replicas_max=st.integers(1, 9), headroom=st.just(1)))
headers = st.builds(Header, format=st.just(FORMAT), version=st.just(VERSION), config=configs)
ticks = st.builds(TickLine, decisions=st.lists(decisions, max_size=2).map(tuple))
lines: st.SearchStrategy[Line] = st.one_of(
    headers,
    st.builds(RequestLine, ttft_ms=st.none() | numbers, e2e_ms=numbers),
    st.builds(ReplicaLine, report=replica_reports),
    st.builds(GatewayLine, report=gateway_reports),
    st.builds(FleetLine, view=whole(FleetView)),
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
