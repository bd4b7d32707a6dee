"""Tables on a narrow terminal: every figure is whole."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from autoscaling.simulator.comparison import compare
from autoscaling.simulator.report import Summary, summarise
from autoscaling.simulator.spec import Pool, Scenario
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import run
from deployments.simulation import tables
from deployments.simulation.loads import load_of
from deployments.simulation.profile_files import load_profile
from policies.config import ObjectivesConfig


def summary() -> Summary:
    source = load_of("poisson:rate=2,prompt=100,output=20,duration=4", Options()).factory
    pool = Pool(load_profile("h100-llama-3.1-8b-bf16"), 2)
    return summarise(run(Scenario("round_robin", source, (pool,), seed=1)), ObjectivesConfig())


def test_eighty_columns_cut_nothing_off() -> None:
    one = summary()
    screen = StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system=None, highlight=False)
    tables.print_summary(console, one)
    tables.print_comparison(console, compare([[one]] * 6))
    assert "…" not in screen.getvalue()
    assert screen.getvalue().count("objectives kept") > 2, "one of the run, the others of parts of the comparison"


def test_a_table_wider_than_the_terminal_is_whole() -> None:
    table = Table("a" * 50, "b" * 50)
    screen = StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system=None, highlight=False)
    tables.print_table(console, table)
    assert "b" * 50 in screen.getvalue()
    assert console.width == 80


def test_small_numbers_keep_three_digits() -> None:
    assert [tables.number(v) for v in (0.00123456, 0.05, 0.5, 5.25)] == ["0.00123", "0.0500", "0.500", "5.25"]
