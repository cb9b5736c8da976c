"""The results of a run, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from loadtest.lab.chaos.answers import Tally
from loadtest.lab.chaos.harm import Harmed


def summary(harmed: Sequence[Harmed]) -> dict[str, dict[str, object]]:
    """Return by kind how often, and how long it took."""
    found: dict[str, dict[str, object]] = {}
    for kind in dict.fromkeys(one.kind for one in harmed):
        ones = [one for one in harmed if one.kind == kind]
        answers = [one.first_answer for one in ones if one.first_answer is not None]
        found[kind] = {
            "times": len(ones),
            "recovery_seconds": _spread([one.recovery for one in ones]),
            "first_answer_seconds": _spread(answers),
        }
    return found


def failures(harmed: Sequence[Harmed]) -> dict[str, dict[str, int]]:
    """Return by kind what streams were told that failed behind it, and how many of them."""
    found: dict[str, Counter[str]] = {}
    for one in harmed:
        if one.failures:
            found.setdefault(one.kind, Counter()).update(one.failures)
    return {kind: dict(told.most_common()) for kind, told in found.items()}


def table(harmed: Sequence[Harmed], tally: Tally, num_gone_on: int) -> str:
    """Return the same for people."""
    lines = [f"{'':16} {'times':>6} {'recovery s':>16} {'first answer s':>16} {'failed':>8}"]
    failed = failures(harmed)
    for kind, one in summary(harmed).items():
        spreads = (_written(one["recovery_seconds"]), _written(one["first_answer_seconds"]))
        number = sum(failed.get(kind, {}).values())
        spread = f"{spreads[0]:>16} {spreads[1]:>16}"
        lines.append(f"{kind:16} {one['times']:>6} {spread} {number:>8}")
    counts = {name: value for name, value in asdict(tally).items() if name != "failed"}
    lines += ["", *(f"{name:16} {value:>8,}" for name, value in counts.items())]
    lines += [f"{'gone on':16} {num_gone_on:>8,}"]
    lines += [f"failed {reason}: {number:,}" for reason, number in tally.failed.items()]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": round(statistics.median(values), 3), "largest": round(max(values), 3)}


def _written(spread: object) -> str:
    return (
        " / ".join(f"{value:.1f}" for value in spread.values()) if isinstance(spread, dict) else ""
    )
