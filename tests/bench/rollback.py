"""Harm that is taken back, and noise that is not: ``python -m tests.bench.rollback [--seeds 10] [--first 1]``.

Simulator, four replicas, all other levers acting. Levers that do harm on purpose (``tests/sim/harm.py``) insist on a
bad value at one knob, everywhere and again and again: the batch, the step budget, speculation, the number of replicas.
Bars: rolled back within 30 ticks of the change, frozen after three roll-backs, and the knob stands where it was at the
end. Then changes to and fro that nobody can feel, under a load whose rate is redrawn every five seconds within 20 %;
bar: none is taken back. Then that load alone, ten minutes of it after a start of five; bars: at most one change of
direction per knob, and nothing is taken back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.harm import HARMLESS, HARMS, Played, play_harm, play_harmless, play_noise

TICKS_MAX = 30
ROLLBACKS = 3
TURNS_MAX = 1


def held(played: Played) -> bool:
    """Whether one run met the bars."""
    in_time = played.first_ticks is not None and played.first_ticks <= TICKS_MAX
    return in_time and played.frozen_after == ROLLBACKS and played.harmless_at_end


def harm_row(name: str, runs: Sequence[Played]) -> str:
    """One lever's line of the table."""
    ticks = [p.first_ticks for p in runs if p.first_ticks is not None]
    frozen = [p.frozen_after for p in runs if p.frozen_after is not None]
    good = sum(map(held, runs))
    first = f"{min(ticks)} to {max(ticks)}" if ticks else "never"
    after = f"{min(frozen)} to {max(frozen)}" if frozen else "never"
    return f"{name:26}{len(runs):6d}{first:>18}{after:>20}{good:>12d}/{len(runs)}"


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    missed = 0
    with ProcessPoolExecutor(args.workers) as pool:
        print(f"{'harmful lever':26}{'runs':>6}{'ticks to roll-back':>18}{'roll-backs to freeze':>20}{'bars met':>15}")
        for harm in HARMS:
            runs = list(pool.map(partial(play_harm, harm), seeds))
            missed += sum(not held(played) for played in runs)
            print(harm_row(harm.name, runs), flush=True)
        print(f"\n{'harmless lever':26}{'runs':>6}{'changes':>18}{'taken back':>20}")
        for harmless in HARMLESS:
            tried = list(pool.map(partial(play_harmless, harmless), seeds))
            missed += sum(bool(texts) for _, texts in tried)
            changes, wrong = sum(n for n, _ in tried), sum(len(texts) for _, texts in tried)
            print(f"{harmless.name:26}{len(tried):6d}{changes:>18d}{wrong:>20d}", flush=True)
        print(f"\n{'noise of 20 %':14}{'knobs':>6}{'most turns in 10 min':>22}{'taken back':>12}   knobs that turned")
        for seed, noisy in zip(seeds, pool.map(play_noise, seeds), strict=True):
            counts, wrong = noisy.turns, len(noisy.taken_back)
            most = max(counts.values(), default=0)
            missed += most > TURNS_MAX or wrong > 0
            turned = sorted({f"{knob.value} {n}" for (knob, _), n in counts.items() if n})
            print(
                f"seed {seed:<9d}{len(counts):>6d}{most:>22d}{wrong:>12d}   {', '.join(turned) or 'none'}", flush=True
            )
            for text in noisy.taken_back[:3]:
                print(f"    {text}")
    print(f"\nbars: {TICKS_MAX} ticks, {ROLLBACKS} roll-backs, {TURNS_MAX} turn, 0 false ones; missed in {missed} runs")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
