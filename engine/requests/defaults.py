"""Fills in what a request leaves away: the defaults of its package, then those of the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import LogitControls, SamplingParams

ALL = "*"  # of the names of defaults
_FIELDS = {"beam": "beam_width"}  # the engine's names, where they are not those of clients
_CONTROLS = frozenset(field.name for field in fields(LogitControls))
_OF_STRATEGY = {
    "sampling": ("temperature", "top_k", "top_p", "min_p", "typical_p"),
    "beam": ("beam_width", "length_penalty", "length_power", "beam_end", "renormalize"),
}
_PENALTIES = ("length_penalty", "length_power")


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
    found = {
        _FIELDS.get(name, name): value
        for name, value in defaults.given.items()
        if name not in without
    }
    strategy = given.get("strategy") or found.get("strategy", "greedy")
    for other, names in _OF_STRATEGY.items():
        if other != strategy:
            found = {name: value for name, value in found.items() if name not in names}
    if any(name in given for name in _PENALTIES):
        found = {name: value for name, value in found.items() if name not in _PENALTIES}
    return {name: value for name, value in found.items() if name not in given}


def _limits(given: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, int]:
    """Return the least or the most tokens where a default would contradict what is given."""
    most = given.get("max_new_tokens", filled.get("max_new_tokens"))
    least = given.get("min_new_tokens", filled.get("min_new_tokens"))
    if most is None or least is None or least <= most:
        return {}
    if "min_new_tokens" in filled:
        return {"min_new_tokens": max(0, most)}
    return {"max_new_tokens": least} if "max_new_tokens" in filled else {}
