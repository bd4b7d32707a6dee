"""Runs scenarios drawn from seeds and reports those that break a rule: ``make sim SEED=n COUNT=k``."""

from __future__ import annotations

import argparse
import sys
import time

from autoscaling.simulator.swarm import examine
from deployments.scaling import decide


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every rule held, 1 when not, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make sim", description="Check the policies in drawn scenarios.")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--verbose", action="store_true", help="say each scenario in words")
    options = parser.parse_args(arguments)
    if options.seed < 0 or options.count < 1:
        parser.error("--seed must not be negative, --count must be at least 1")
    failed: list[int] = []
    began = time.monotonic()
    try:
        for done, seed in enumerate(range(options.seed, options.seed + options.count), 1):
            if not _one(seed, options.verbose or options.count == 1):
                failed.append(seed)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{done} of {options.count} seeds, {len(failed)} failed")
                sys.stderr.flush()
    except KeyboardInterrupt:
        _say("\nbroken off")
        return 130
    seconds = time.monotonic() - began
    names = f": {', '.join(map(str, failed))}" if failed else ""
    _say(f"\n{options.count} seeds in {seconds:.1f} s, {len(failed)} failed{names}")
    return 1 if failed else 0


def _one(seed: int, verbose: bool) -> bool:
    verdict = examine(seed, decide)
    if verbose or verdict.violation is not None:
        _say(verdict.report())
    if verbose and verdict.result is not None:
        counters = verdict.result.counters
        shown = ("requests", "succeeded", "failed", "cancelled", "refused", "retries", "kills", "starts", "events")
        _say("  " + ", ".join(f"{counters[name]} {name}" for name in shown))
        _say(f"  digest {verdict.result.digest[:16]}")
    return verdict.violation is None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
