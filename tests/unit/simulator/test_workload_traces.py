"""Parsers of recorded traffic: what they read, and what they say to a file that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator.spec import SimRequest, SourceFactory
from autoscaling.simulator.workload.agents import parse_exgentic, parse_tracelab, replay_sessions
from autoscaling.simulator.workload.azure import parse_azure, parse_azure_week
from autoscaling.simulator.workload.lengths import parse_quantiles
from autoscaling.simulator.workload.mooncake import parse_mooncake, spread_ties
from autoscaling.simulator.workload.servegen import from_clients, parse_servegen_clients, parse_servegen_rates
from autoscaling.simulator.workload.timestamps import timestamp_ns
from autoscaling.simulator.workload.trace import Options, TraceError, play
from tests.examples import examples

MOONCAKE = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}',
    '{"timestamp": 0, "input_length": 1024, "output_length": 6, "hash_ids": [7, 10]}',
    '{"timestamp": 3000, "input_length": 100, "output_length": 7, "hash_ids": [11]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
]
WEEK = [
    "t_min,req_per_min_low,req_per_min_high,req_per_min_mid,req_per_min_mid_scaled",
    "7.2,100,140,120,60",
    "14.4,100,140,120,120",
]
RATES = ["t_s,rate_rps,rate_weighted_client_iat_cv,active_clients", "0,2,1.5,4", "1200,4,1.5,4"]
CLIENTS = [
    "client,t_s,rate_rps,iat_cv,pattern,p1,p2",
    "0,0,2,1,Gamma,1,0.5",
    "0,600,1,3,Weibull,0.4,9.9",
    "1,600,0.5,1,Gamma,4,0.5",
]
QUANTILES = ["category,field,mean,p0.5,p50,p99.9", "a/b,input_tokens,5,1,5,9", "a/b,output_tokens,3,1,3,5"]
EXGENTIC = [
    "session,call_index,prompt_tokens,completion_tokens,model,status",
    "shop/1/agent,0,5000,50,m,success",
    "shop/1/agent,1,5100,40,m,success",
    "shop/1/user-sim,0,400,20,m,success",
    "shop/2/agent,0,5010,50,m,success",
]


def tracelab_round(session: str, number: int, prompt: int, prefix: int, begin: str, end: str, output: int = 100) -> str:
    events = f'[{{"event_type": "user_message", "timestamp": "2026-06-01T00:00:{begin}Z"}}, '
    events += f'{{"event_type": "text", "timestamp": "2026-06-01T00:00:{end}Z"}}]'
    return (
        f'{{"provider": "p", "session_id": "{session}", "round_index": {number}, "input_tokens_total": {prompt}, '
        f'"prefix_tokens": {prefix}, "output_tokens": {output}, "timing_events": {events}, "more": 1}}'
    )


TRACELAB = [
    tracelab_round("a", 0, 3000, 2000, "00.000", "05.000"),
    tracelab_round("a", 1, 4000, 2000, "07.500", "09.000"),
    tracelab_round("a", 2, 3500, 1024, "10.000", "11.000"),
]


def drawn(factory: SourceFactory) -> list[SimRequest]:
    return list(factory(Random("1")).arrivals())


def test_mooncake_counts_full_blocks_only_and_shares_prefixes() -> None:
    first, second, third = drawn(play(parse_mooncake(MOONCAKE, "m")))
    assert [len(r.blocks) for r in (first, second, third)] == [2, 2, 0]
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert third.arrival_ns == 3_000_000_000
    assert (first.prompt_tokens, first.output_tokens, first.block_tokens) == (1100, 5, 512)


def test_requests_of_one_time_are_spread_up_to_the_next() -> None:
    rows = drawn(play(spread_ties(parse_mooncake(MOONCAKE, "m"))))
    assert [r.arrival_ns for r in rows] == [0, 1_500_000_000, 3_000_000_000]


def test_azure_times_are_exact_to_100_ns() -> None:
    rows = drawn(play(parse_azure(AZURE, "a")))
    assert [r.arrival_ns for r in rows] == [0, 52_000_000]
    assert [(r.prompt_tokens, r.output_tokens) for r in rows] == [(4808, 10), (3180, 8)]


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        (Options(scale=2.0), [0.0, 0.0, 1.5]),
        (Options(limit=2), [0.0, 0.0]),
        (Options(duration_s=3.0), [0.0, 0.0]),
        (Options(start_s=1.0), [2.0]),
    ],
)
def test_options_of_a_trace(options: Options, expected_s: list[float]) -> None:
    assert [r.arrival_ns / 1e9 for r in drawn(play(parse_mooncake(MOONCAKE, "m"), options))] == expected_s


@pytest.mark.parametrize("text", ["1969-12-31T23:59:59.5Z", "2000-02-29 00:00:00+05:30", "2026-11-30T10:00:00-08:00"])
def test_times_are_those_of_the_calendar(text: str) -> None:
    expected = datetime.fromisoformat(text)
    expected = expected if expected.tzinfo else expected.replace(tzinfo=UTC)
    assert timestamp_ns(text) == round(expected.timestamp() * 1000) * 1_000_000


def test_days_follow_the_calendar() -> None:
    day, ns = date(1890, 1, 1), 86_400 * 1_000_000_000
    first = timestamp_ns("1890-01-01 00:00:00")
    assert first == (day - date(1970, 1, 1)).days * ns
    for n in range(0, 120_000, 37):
        at = day + timedelta(days=n)
        assert timestamp_ns(f"{at:%Y-%m-%d} 00:00:00") == first + n * ns
    assert timestamp_ns("1900-02-29 00:00:00") is None
    assert timestamp_ns("2026-13-01 00:00:00") is None


def test_azure_week_is_a_rate_per_second() -> None:
    curve = parse_azure_week(WEEK, "w")
    assert curve.rate_rps(0.0) == pytest.approx(1.0)
    assert curve.rate_rps(500.0) == pytest.approx(2.0)
    assert curve.length_s == pytest.approx(864.0)


def test_a_window_that_is_absent_is_idle() -> None:
    curve = parse_servegen_rates(RATES, "s")
    assert [curve.rate_rps(t) for t in (10.0, 700.0, 1300.0)] == [2.0, 0.0, 4.0]


def test_clients_meet_their_rate_whatever_scale_was_fitted() -> None:
    lengths = parse_quantiles(QUANTILES, "q")["a/b"]
    clients = parse_servegen_clients(CLIENTS, "c")
    counts = {"client-0": 0, "client-1": 0}
    runs = 8
    for seed in range(runs):
        rows = list(from_clients(clients, "c", lengths)(Random(f"{seed}")).arrivals())
        assert [r.arrival_ns for r in rows] == sorted(r.arrival_ns for r in rows)
        for row in rows:
            counts[row.tenant] += 1
    assert counts["client-0"] / runs == pytest.approx(1800, rel=0.08)
    assert counts["client-1"] / runs == pytest.approx(300, rel=0.08)


def test_one_more_client_moves_no_other() -> None:
    lengths = parse_quantiles(QUANTILES, "q")["a/b"]
    both = from_clients(parse_servegen_clients(CLIENTS, "c"), "c", lengths)
    alone = from_clients(parse_servegen_clients(CLIENTS[:3], "c"), "c", lengths)
    of_first = [(r.arrival_ns, r.prompt_tokens) for r in drawn(both) if r.tenant == "client-0"]
    assert of_first == [(r.arrival_ns, r.prompt_tokens) for r in drawn(alone)]


def test_a_tracelab_prompt_begins_with_what_was_said_before() -> None:
    source = replay_sessions(parse_tracelab(TRACELAB, "t"), "t", 1.0)(Random("1"))
    first = next(iter(source.arrivals()))
    (second,) = source.follow_ups(first, True, 10_000_000_000)
    (third,) = source.follow_ups(second, True, 20_000_000_000)
    assert source.follow_ups(third, True, 30_000_000_000) == []
    assert (second.arrival_ns, third.arrival_ns) == (12_500_000_000, 21_000_000_000)
    size = first.block_tokens
    assert second.blocks[: 3100 // size] == first.blocks_after  # prompt and answer
    assert third.blocks[: 1024 // size] == second.blocks[: 1024 // size]  # the context was cut to 1,024 tokens
    assert third.blocks[1024 // size] != second.blocks[1024 // size]
    assert [r.task_last for r in (first, second, third)] == [False, False, True]


def test_exgentic_roles_of_a_task_take_turns_and_keep_their_contexts() -> None:
    sessions = parse_exgentic(EXGENTIC, "e")
    assert [(c.role, c.shared_tokens) for c in sessions[0].calls] == [
        ("agent", 4980),
        ("user-sim", 400),
        ("agent", 5050),
    ]
    source = replay_sessions(sessions[:1], "e", 1.0)(Random("1"))
    first = next(iter(source.arrivals()))
    (other,) = source.follow_ups(first, True, 1)
    (second,) = source.follow_ups(other, True, 2)
    assert other.blocks[0] != first.blocks[0]
    assert second.blocks[: len(first.blocks)] == first.blocks


BAD: list[tuple[str, Callable[..., object], list[str], int | None, str]] = [
    ("empty", parse_mooncake, [], None, "no requests"),
    ("blank", parse_mooncake, ["", " "], None, "no requests"),
    ("cut off", parse_mooncake, [MOONCAKE[0], MOONCAKE[1][:40]], 2, "not JSON"),
    ("a list", parse_mooncake, ["[1, 2]"], 1, "expected a JSON object"),
    ("nested", parse_mooncake, ["[" * 100_000], 1, "not JSON"),
    ("unsorted", parse_mooncake, [MOONCAKE[2], MOONCAKE[0]], 2, "before the row above"),
    ("negative", parse_mooncake, [MOONCAKE[0].replace(": 0", ": -5")], 1, "timestamp must be in 0"),
    ("NaN", parse_mooncake, [MOONCAKE[0].replace("1100", "NaN")], 1, "input_length must be in 1"),
    ("infinite", parse_mooncake, [MOONCAKE[0].replace(": 0", ": Infinity")], 1, "timestamp must be in 0"),
    ("text", parse_mooncake, [MOONCAKE[0].replace("1100", '"many"')], 1, "must be a number, is 'many'"),
    ("fraction", parse_mooncake, [MOONCAKE[0].replace("1100", "1100.5")], 1, "whole number"),
    ("huge number", parse_mooncake, [MOONCAKE[0].replace("1100", "9" * 4000)], 1, "input_length must be"),
    ("absurd", parse_mooncake, [MOONCAKE[0].replace("1100", "99999999")], 1, "10,000,000"),
    ("no output", parse_mooncake, [MOONCAKE[0].replace(": 5,", ": 0,")], 1, "output_length must be in 1"),
    ("missing", parse_mooncake, ['{"timestamp": 1}'], 1, "input_length is missing"),
    ("unknown", parse_mooncake, [MOONCAKE[0].replace('"hash_ids"', '"x": 1, "hash_ids"')], 1, "unknown field: x"),
    ("ids", parse_mooncake, [MOONCAKE[0].replace("[7, 8, 9]", "[7]")], 1, "1 hash_ids for 1100 tokens, expected 3"),
    ("id", parse_mooncake, [MOONCAKE[0].replace("[7, 8, 9]", '["a"]')], 1, "list of whole numbers"),
    ("empty", parse_azure, [], None, "empty; expected a header"),
    ("header only", parse_azure, AZURE[:1], None, "no requests"),
    ("column missing", parse_azure, ["TIMESTAMP,ContextTokens"], 1, "column missing: GeneratedTokens"),
    ("column unknown", parse_azure, [AZURE[0] + ",x"], 1, "unknown column: x"),
    ("column twice", parse_azure, [AZURE[0] + ",ContextTokens"], 1, "column twice"),
    ("cut off", parse_azure, [*AZURE[:2], "2023-11-16 18:17:0"], 3, "1 fields, the header has 3"),
    ("time", parse_azure, [AZURE[0], "soon,1,1"], 2, "is no time"),
    ("no such day", parse_azure, [AZURE[0], "2023-02-30 10:00:00,1,1"], 2, "is no time"),
    ("unsorted", parse_azure, [AZURE[0], AZURE[2], AZURE[1]], 3, "before the row above"),
    ("negative", parse_azure, [AZURE[0], AZURE[1].replace("4808", "-1")], 2, "ContextTokens must be in 1"),
    ("week back", parse_azure_week, [WEEK[0], WEEK[2], WEEK[1]], 3, "does not grow"),
    ("week zero", parse_azure_week, [WEEK[0], "7.2,0,0,0,0"], None, "zero all the time"),
    ("week empty", parse_azure_week, WEEK[:1], None, "no rates"),
    ("rates nan", parse_servegen_rates, [RATES[0], "0,nan,1,1"], 2, "rate_rps must be in 0"),
    ("rates overlap", parse_servegen_rates, [RATES[0], "0,1,1,1", "300,1,1,1"], 3, "overlaps"),
    ("rates zero", parse_servegen_rates, [RATES[0], "0,0,1,1"], None, "zero all the time"),
    ("pattern", parse_servegen_clients, [CLIENTS[0], "0,0,2,1,Pareto,1,1"], 2, "expected Gamma or Weibull"),
    ("shape", parse_servegen_clients, [CLIENTS[0], "0,0,2,1,Gamma,0,1"], 2, "greater than 0"),
    ("clients zero", parse_servegen_clients, [CLIENTS[0], "0,0,0,1,Gamma,1,1"], None, "no client with a rate"),
    ("clients overlap", parse_servegen_clients, [*CLIENTS[:2], CLIENTS[1]], 3, "overlaps"),
    ("quantiles fall", parse_quantiles, [QUANTILES[0], "a/b,input_tokens,5,9,5,1"], 2, "must grow"),
    ("quantiles field", parse_quantiles, [QUANTILES[0], "a/b,inputs,5,1,5,9"], 2, "input_tokens or output_tokens"),
    ("quantiles empty", parse_quantiles, [], None, "empty"),
    ("round order", parse_tracelab, [TRACELAB[1]], 1, "round_index is 1, expected 0"),
    ("prefix", parse_tracelab, [TRACELAB[0].replace("2000", "5000")], 1, "prefix_tokens must be in 0..3,000"),
    ("event time", parse_tracelab, [TRACELAB[0].replace("2026-06-01T", "x")], 1, "timestamp like 2026"),
    ("event zone", parse_tracelab, [TRACELAB[0].replace("Z", "")], 1, "timestamp like 2026"),
    ("no events", parse_tracelab, [TRACELAB[0].replace('"timing_events"', '"t"')], 1, "timing_events is missing"),
    ("call order", parse_exgentic, [EXGENTIC[0], EXGENTIC[2]], 2, "call_index is 1, expected 0"),
    ("session name", parse_exgentic, [EXGENTIC[0], "shop,0,1,1,m,s"], 2, "FAMILY/TASK/ROLE"),
]


@pytest.mark.parametrize(
    ("parse", "lines", "line", "expected"), [b[1:] for b in BAD], ids=[f"{b[1].__name__}-{b[0]}" for b in BAD]
)
def test_bad_input_is_named_with_file_and_line(
    parse: Callable[..., object], lines: list[str], line: int | None, expected: str
) -> None:
    with pytest.raises(TraceError) as caught:
        parse(lines, "trace.x")
    assert expected in str(caught.value)
    assert (caught.value.file, caught.value.line) == ("trace.x", line)
    assert str(caught.value).startswith("trace.x:")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "parse", [parse_mooncake, parse_azure, parse_azure_week, parse_servegen_rates, parse_servegen_clients,
              parse_quantiles, parse_tracelab, parse_exgentic],
)  # fmt: skip
@settings(max_examples=examples(12))
@given(data=st.data())
def test_damaged_lines_never_end_in_another_error(parse: Callable[..., object], data: st.DataObject) -> None:
    good = {
        parse_mooncake: MOONCAKE, parse_azure: AZURE, parse_azure_week: WEEK, parse_servegen_rates: RATES,
        parse_servegen_clients: CLIENTS, parse_quantiles: QUANTILES, parse_tracelab: TRACELAB, parse_exgentic: EXGENTIC,
    }[parse]  # fmt: skip
    lines = list(good)
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(lines) - 1))
        at = data.draw(st.integers(0, len(lines[row])))
        junk = data.draw(st.one_of(st.text(max_size=3), st.sampled_from([",", "-", "1e309", "nan", "null", "0", '"'])))
        lines[row] = lines[row][:at] + junk + lines[row][at + data.draw(st.integers(0, 6)) :]
    try:
        parse(lines, "x")
    except TraceError as error:
        assert str(error).startswith("x:")  # noqa: PT017


def test_a_trace_is_not_compressed_and_its_start_is_inside() -> None:
    table = parse_mooncake(MOONCAKE, "m")
    with pytest.raises(TraceError, match="after the last request at 3 s"):
        play(table, Options(start_s=4.0))
    with pytest.raises(TraceError, match="played faster with scale"):
        play(table, Options(compress=2.0))


@pytest.mark.parametrize(
    "bad",
    [{"scale": 0.0}, {"scale": float("nan")}, {"scale": -1.0}, {"duration_s": 0.0}, {"limit": 0}, {"start_s": -1.0},
     {"duration_s": float("inf")}, {"compress": 0.0}],
)  # fmt: skip
def test_impossible_options_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(TraceError, match=next(iter(bad))):
        Options(**bad)  # type: ignore[arg-type]
