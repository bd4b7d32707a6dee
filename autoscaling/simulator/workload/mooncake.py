"""Mooncake traces: one JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

``hash_ids`` number the prompt's blocks of 512 tokens, the last of which is rarely full: ``ceil(input_length / 512)``
ids, of which the first ``floor(input_length / 512)`` count. An id names a block together with everything before it.
Arrivals of the conversation trace are rounded to about 3 s: bursts of a second say nothing; :func:`spread_ties` takes
them apart.

Source of the format: kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaling.simulator.workload.blocks import chain, label_of
from autoscaling.simulator.workload.trace import TIME_S_MAX, Table, TraceError, count_of, json_rows, number_of

BLOCK_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def parse_mooncake(lines: Iterable[str], name: str) -> Table:
    """Read a whole trace; raises :class:`TraceError` with the line that cannot be used."""
    table = Table(name, BLOCK_TOKENS)
    salt = label_of("mooncake")
    for line, row in json_rows(lines, name):
        unknown = [key for key in row if key not in KEYS]
        if unknown:
            raise TraceError(f"unknown field: {', '.join(unknown)[:80]}; expected {', '.join(KEYS)}", name, line)
        at_ms = number_of(row, "timestamp", name, line, to=TIME_S_MAX * 1e3)
        prompt_tokens = count_of(row, "input_length", name, line, at_least=1)
        output_tokens = count_of(row, "output_length", name, line, at_least=1)
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 1 << 63 for i in ids):
            raise TraceError("hash_ids must be a list of whole numbers", name, line)
        expected = -(-prompt_tokens // BLOCK_TOKENS)
        if len(ids) not in {expected, expected - 1}:
            raise TraceError(f"{len(ids)} hash_ids for {prompt_tokens} tokens, expected {expected}", name, line)
        blocks = chain(ids, prompt_tokens // BLOCK_TOKENS, salt)
        table.add(round(at_ms * 1e6), prompt_tokens, output_tokens, blocks, line)
    return table.finished()


def spread_ties(table: Table) -> Table:
    """The same rows with those of one time spread evenly up to the next time; the last group keeps its time."""
    spread = Table(table.name, table.block_tokens)
    rows, first = len(table), 0
    while first < rows:
        at_ns = table.arrival_ns[first]
        after = first
        while after < rows and table.arrival_ns[after] == at_ns:
            after += 1
        gap_ns = (table.arrival_ns[after] - at_ns) // (after - first) if after < rows else 0
        for row in range(first, after):
            at = at_ns + gap_ns * (row - first)
            spread.add(at, table.prompt_tokens[row], table.output_tokens[row], table.blocks(row), row + 1)
        first = after
    return spread
