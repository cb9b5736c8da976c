"""Fills in what a request leaves away: the defaults of its package, then those of the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import BY_NAME, OPTIONS
from engine.requests.request import LogitControls, SamplingParams

ALL = "*"  # the names of all defaults
_CONTROLS = frozenset(o.field for o in OPTIONS if o.message == "decoding.controls")
_PENALTIES = ("length_penalty", "length_penalty_form")  # each says what the other means


def sampling_params(
    asked: Mapping[str, Any], defaults: GenerationDefaults, without: Collection[str] = ()
) -> SamplingParams:
    """Return the parameters of a request.

    `asked` are fields of SamplingParams, and of LogitControls beside them, that the request names;
    `without` are names of defaults that do not hold for it, or ALL.
    """
    filled = _applying(asked, defaults, without) if defaults.given else {}
    values = {**filled, **asked, **_limits(asked, filled)}
    controls = LogitControls(**{name: values.pop(name) for name in _CONTROLS & values.keys()})
    return SamplingParams(controls=controls, **values)


def _applying(
    given: Mapping[str, Any], defaults: GenerationDefaults, without: Collection[str]
) -> dict[str, Any]:
    """Return the defaults that hold beside what is given, by the engine's names."""
    if ALL in without:
        return {}
    kept = {name: value for name, value in defaults.given.items() if name not in without}
    strategy = given.get("strategy") or kept.get("strategy", "greedy")
    has_penalty = any(name in given for name in _PENALTIES)
    found = {}
    for name, value in kept.items():
        option = BY_NAME[name]
        holds = option.strategy in ("", strategy) and not (has_penalty and name in _PENALTIES)
        if holds and option.field not in given:
            found[option.field] = value
    return found


def _limits(given: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, int]:
    """Return the least or the most tokens where a default would contradict what is given."""
    most = given.get("max_new_tokens", filled.get("max_new_tokens"))
    least = given.get("min_new_tokens", filled.get("min_new_tokens"))
    if most is None or least is None or least <= most:
        return {}
    if "min_new_tokens" in filled:
        return {"min_new_tokens": max(0, most)}
    return {"max_new_tokens": least} if "max_new_tokens" in filled else {}
