from __future__ import annotations

from pathlib import Path

from policies.control.catalogue import CONDITIONS, ConditionSpec

DOCUMENT = Path(__file__).parents[3] / "policies" / "control" / "CONDITIONS.md"


def section(spec: ConditionSpec) -> str:
    levers = ", ".join(lever.value for lever in spec.levers) or "none: a person must act"
    return "\n".join(
        [
            f"### `{spec.name}`",
            "",
            f"{spec.title}.",
            "",
            f"- begins: {spec.begin}; {spec.on_ticks} tick{'s in a row' if spec.on_ticks > 1 else ''}",
            f"- ends: {spec.end}; {spec.off_ticks} ticks in a row",
            f"- detected within {spec.detect_s:g} s of: {spec.scenario}",
            f"- levers, in this order: {levers}",
            f"- next step: {spec.next_step}",
            "",
        ]
    )


def test_every_condition_is_documented_as_the_table_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = "\n".join(section(spec) for spec in CONDITIONS)
    assert text.partition("## The conditions\n\n")[2] == wanted
