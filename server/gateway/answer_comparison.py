"""Compares two answers to one request: what they decide, and how far their numbers are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tokenweir.v1 import admin_service_pb2
from tokenweir.v1 import generation_service_pb2 as generation
from tokenweir.v1 import prediction_service_pb2 as prediction

from server.api import GENERATION, PREDICTION

_SAME = 1e-3  # so far numbers may be apart where there is nothing but numbers
Difference = admin_service_pb2.Difference


@dataclass(frozen=True)
class Compared:
    """The difference between two answers; see Comparison in the protocol."""

    first_difference: Difference | None = None
    distance: float = 0.0  # between numbers, at most


def compare(method: str, one: Any, other: Any) -> Compared:
    """Compare two answers of a method of COMPARABLE."""
    first, largest = None, 0.0
    for difference, distance in COMPARABLE[method](one, other):
        first = first or difference
        largest = max(largest, distance)
    return Compared(first, largest)


_Found = Iterator[tuple[Difference | None, float]]


def _generations(one: generation.GenerateResponse, other: generation.GenerateResponse) -> _Found:
    for i, (result, other_result) in enumerate(zip(one.results, other.results, strict=False)):
        pairs = zip_longest(result.sequences, other_result.sequences)
        for k, (sequence, other_sequence) in enumerate(pairs):
            if sequence is None or other_sequence is None:
                yield Difference(input=i, output=k), 0.0
            elif (token := _first(sequence.tokens.ids, other_sequence.tokens.ids)) is not None:
                yield Difference(input=i, output=k, token=token), 0.0
            elif sequence.text != other_sequence.text:
                yield Difference(input=i, output=k, token=len(sequence.tokens.ids)), 0.0


def _scores(one: generation.ScoreResponse, other: generation.ScoreResponse) -> _Found:
    for i, (score, other_score) in enumerate(zip(one.scores, other.scores, strict=False)):
        distance = _distance(score.sum_logprob, other_score.sum_logprob)
        yield Difference(input=i) if distance > _SAME else None, distance


def _classes(one: prediction.ClassifyResponse, other: prediction.ClassifyResponse) -> _Found:
    """Compare the likeliest label, and its number if it is the only one."""
    for i, (found, other_found) in enumerate(zip(one.results, other.results, strict=False)):
        numbers = {label.label: label.probability for label in other_found.labels}
        distance = max(
            (
                _distance(label.probability, numbers[label.label])
                for label in found.labels
                if label.label in numbers
            ),
            default=0.0,
        )
        best = [labels[0].label for labels in (found.labels, other_found.labels) if labels]
        is_number = len(found.labels) == len(other_found.labels) == 1
        differs = len({*best}) > 1 or (is_number and distance > _SAME)
        yield Difference(input=i) if differs else None, distance


def _spans(one: prediction.LabelResponse, other: prediction.LabelResponse) -> _Found:
    for i, (found, other_found) in enumerate(zip(one.results, other.results, strict=False)):
        k = _first(_decided(found.spans), _decided(other_found.spans))
        yield Difference(input=i, output=k) if k is not None else None, 0.0
        for span, other_span in list(zip(found.spans, other_found.spans, strict=False))[:k]:
            yield None, _distance(span.label.probability, other_span.label.probability)


def _vectors(one: prediction.EmbedResponse, other: prediction.EmbedResponse) -> _Found:
    for i, (vector, other_vector) in enumerate(zip(one.vectors, other.vectors, strict=False)):
        if len(vector.values) != len(other_vector.values):
            yield Difference(input=i), 0.0
            continue
        longer = max(math.hypot(*vector.values), math.hypot(*other_vector.values))
        distance = math.dist(vector.values, other_vector.values) / (longer or 1.0)
        yield Difference(input=i) if distance > _SAME else None, distance


def _decided(spans: Iterable[prediction.LabelResponse.Span]) -> list[tuple[int, int, str]]:
    return [(span.start_byte, span.end_byte, span.label.label) for span in spans]


def _first(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return where two sequences begin to differ; None if they do not."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _distance(one: float, other: float) -> float:
    """Return how far numbers are apart; where one is above 1, in parts of it."""
    return abs(one - other) / max(1.0, abs(one), abs(other))


# By the path of the method that is asked again: how its answers are compared.
COMPARABLE: Mapping[str, Callable[[Any, Any], _Found]] = {
    f"/{GENERATION}/Generate": _generations,
    f"/{GENERATION}/Score": _scores,
    f"/{PREDICTION}/Classify": _classes,
    f"/{PREDICTION}/Label": _spans,
    f"/{PREDICTION}/Embed": _vectors,
}
