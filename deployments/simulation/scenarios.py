"""From what people ask for to scenarios: the fleet, who routes and who scales, and the arms of a comparison.

An arm is named by its parts, joined by ``+``: ``tidegate``, ``round_robin``, ``hpa``, ``power_of_two+ray_serve``. A
part that is missing is what the command line says for all. Engines behind another router than ours keep their start-up
batch settings: none of Tidegate's loops acts there, as in the fleets that run it today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaling.simulator.baselines.tables import ROUTERS, SCALERS, as_users_run_it, router_for_run
from autoscaling.simulator.spec import ClientSpec, EngineProfile, Fault, Pool, Scenario
from deployments.scaling import decide
from deployments.simulation.choices import ChoiceError, chosen, count_in, near
from deployments.simulation.loads import Load
from policies.config import PolicyConfig

LIVE = "tidegate"
"""The live router and the live scaler."""
FIXED = "fixed"

REPLICAS_MAX = 100_000
"""Largest fleet of a simulation."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of one kind: how many at the start, the bounds of the number, and how they are divided."""

    profile: EngineProfile
    replicas: int
    replicas_min: int
    replicas_max: int
    split: tuple[int, int] | None = None
    """Prefill and decode replicas at the start; ``None``: every replica does both."""

    @property
    def largest(self) -> int:
        """Most replicas there can be at once."""
        if self.split is None:
            return self.replicas_max
        return sum(self.split) if self.replicas_min == self.replicas_max else 2 * self.replicas_max

    def words(self) -> str:
        """Say it in a few words."""
        if self.split:
            return f"{self.split[0]} prefill + {self.split[1]} decode x {self.profile.name}"
        if self.replicas_min == self.replicas_max:
            return f"{self.replicas} x {self.profile.name}"
        return f"{self.replicas_min}..{self.replicas_max} x {self.profile.name}"


@dataclass(frozen=True, slots=True)
class Arm:
    """One set-up of a comparison."""

    name: str
    router: str
    scaler: str


def fleet_of(
    profile: EngineProfile,
    config: PolicyConfig,
    *,
    replicas: int | None,
    low: int | None,
    high: int | None,
    split: str | None,
    settings_given: bool,
) -> Fleet:
    """Return the fleet that the options describe.

    A number alone is fixed; bounds let it move. With neither, the bounds of the settings count where settings were
    given, else one replica.

    Raises:
        ChoiceError: bounds that contradict each other, or a split that is none.
    """
    for what, value, least in (("--replicas", replicas, 1), ("--min", low, 0), ("--max", high, 1)):
        if value is not None and not least <= value <= REPLICAS_MAX:
            raise ChoiceError(f"{what} must be in {least}..{REPLICAS_MAX:,}, is {value}")
    parts = _split(split) if split else None
    if parts and replicas is not None:
        raise ChoiceError("--replicas and --split both say how many replicas there are; give one")
    if low is None and high is None and replicas is None and settings_given and not parts:
        low, high = config.scaling.replicas_min, config.scaling.replicas_max
    if low is None and high is None:
        fixed = replicas or 1
        return Fleet(profile, fixed, fixed, fixed, parts)
    low = 1 if low is None else low
    high = high if high is not None else max(low, replicas or low, 1)
    if low > high:
        raise ChoiceError(f"--min ({low}) must not be above --max ({high})")
    start = replicas if replicas is not None else max(1, low)
    what, starts = ("--replicas", (start,)) if parts is None else (f"--split {split}: each part", parts)
    for number in starts:
        if not low <= number <= high:
            raise ChoiceError(f"{what} ({number}) must be between --min ({low}) and --max ({high})")
    return Fleet(profile, start, low, high, parts)


def _split(text: str) -> tuple[int, int]:
    prefill, colon, decode = text.partition(":")
    if not colon:
        raise ChoiceError(f"--split {text}: expected PREFILL:DECODE replicas, such as 2:1")
    parts = (("prefill", prefill), ("decode", decode))
    numbers = [count_in(f"--split {text}: {what}", part, to=REPLICAS_MAX) for what, part in parts]
    return numbers[0], numbers[1]


def arms_of(compare: str | None, router: str, scaler: str) -> list[Arm]:
    """Return the arms that ``--compare`` names, else the one of ``router`` and ``scaler``.

    Raises:
        ChoiceError: a part that is neither a router nor a scaler, or two of one sort in one arm.
    """
    chosen("--router", router, ROUTERS)
    chosen("--scaler", scaler, SCALERS)
    if compare is None:
        return [_arm(f"{router}+{scaler}" if scaler not in (LIVE, FIXED) else router, router, scaler)]
    names = [name.strip() for name in compare.split(",") if name.strip()]
    if not names:
        raise ChoiceError("--compare: names no router and no scaler")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ChoiceError(f"--compare: {twice[0]} is given twice")
    return [_arm(name, router, scaler) for name in names]


def check_arms(arms: Sequence[Arm], *, moves: bool) -> None:
    """Raise ``ChoiceError`` for a scaler where the number of replicas is fixed."""
    for arm in arms:
        if arm.scaler not in (LIVE, FIXED) and not moves:
            raise ChoiceError(f"{arm.scaler}: the number of replicas is fixed; give --min and --max")


def _arm(name: str, router: str, scaler: str) -> Arm:
    found: dict[str, str] = {}
    for part in name.split("+"):
        sorts = [sort for sort, known in (("router", ROUTERS), ("scaler", SCALERS)) if part in known]
        if not sorts:
            raise ChoiceError(f"{part!r} is neither a router nor a scaler{near(part, [*ROUTERS, *SCALERS])}")
        sort = sorts[0] if len(sorts) == 1 or "router" not in found else "scaler"
        if sort in found:
            raise ChoiceError(f"{name}: {found[sort]} and {part} are both {sort}s; an arm has one of each")
        found[sort] = part
    return Arm(name, found.get("router", router), found.get("scaler", scaler))


def scenario_of(
    load: Load,
    fleet: Fleet,
    arm: Arm,
    config: PolicyConfig,
    *,
    seed: int,
    gateways: int = 2,
    clients: ClientSpec | None = None,
    faults: Sequence[Fault] = (),
) -> Scenario:
    """Return the scenario of one arm and seed."""
    scaling = replace(config.scaling, replicas_min=fleet.replicas_min, replicas_max=fleet.replicas_max)
    config = replace(config, scaling=scaling)
    if arm.router != LIVE:
        config = as_users_run_it(config)
    scaler = SCALERS[arm.scaler]
    if fleet.split:
        pools = tuple(
            Pool(fleet.profile, n, role, scaler=scaler)
            for n, role in zip(fleet.split, ("prefill", "decode"), strict=True)
        )
    else:
        pools = (Pool(fleet.profile, fleet.replicas, scaler=scaler),)
    return Scenario(
        name=arm.name, source=load.factory, pools=pools, seed=seed, config=config, gateways=gateways,
        router=router_for_run(arm.router), clients=clients or ClientSpec(), faults=tuple(faults), local_rule=decide,
    )  # fmt: skip
