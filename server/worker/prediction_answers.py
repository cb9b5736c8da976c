"""Turns predictions into the protocol's answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenweir.v1 import common_pb2
from tokenweir.v1 import prediction_service_pb2 as pb

from engine.one_pass.prediction import ItemPrediction
from engine.one_pass.scores import SCORES, softmax
from engine.package.manifest import LabelScores
from server.worker.entities import Entity, Strategy, find_entities


def classes(
    item: ItemPrediction,
    labels: Sequence[str],
    top: int | None,
    scores: LabelScores = "softmax",
) -> pb.ClassifyResponse.Classes:
    """Return the `top` best classes, all for 0, the best one for None."""
    probabilities = SCORES[scores](item.logits)  # (num_labels,)
    count = 1 if top is None else top or len(probabilities)
    best = np.argsort(-probabilities, kind="stable")[:count]
    return pb.ClassifyResponse.Classes(
        labels=[_scored_label(int(i), float(probabilities[i]), labels) for i in best]
    )


def spans(
    item: ItemPrediction, labels: Sequence[str], strategy: Strategy | None = None
) -> pb.LabelResponse.Spans:
    """Return the best label of every token, or with a strategy the entities."""
    probabilities = softmax(item.logits)  # (num_tokens, num_labels)
    if strategy is not None:
        found = find_entities(probabilities, item.spans, item.continues, labels, strategy)
        return pb.LabelResponse.Spans(spans=map(_entity_span, found))
    best = probabilities.argmax(axis=-1)  # (num_tokens,)
    return pb.LabelResponse.Spans(
        spans=[
            pb.LabelResponse.Span(
                start_byte=start,
                end_byte=end,
                label=_scored_label(int(label), float(row[label]), labels),
            )
            for (start, end), row, label in zip(item.spans, probabilities, best, strict=True)
        ]
    )


def _entity_span(entity: Entity) -> pb.LabelResponse.Span:
    label = pb.ScoredLabel(label=entity.label, probability=entity.probability, index=entity.index)
    return pb.LabelResponse.Span(start_byte=entity.start, end_byte=entity.end, label=label)


def vector(item: ItemPrediction, *, normalize: bool) -> pb.EmbedResponse.Vector:
    """Return the embedding, of length 1 if asked for."""
    values = item.embedding.astype(np.float64)
    length = float(np.linalg.norm(values))
    if normalize and length > 0:
        values = values / length
    return pb.EmbedResponse.Vector(values=values.tolist())


def prediction_usage(items: Sequence[ItemPrediction]) -> common_pb2.Usage:
    """Return what a prediction consumed."""
    return common_pb2.Usage(input_tokens=sum(item.input_tokens for item in items))


def _scored_label(index: int, probability: float, labels: Sequence[str]) -> pb.ScoredLabel:
    name = labels[index] if index < len(labels) else str(index)
    return pb.ScoredLabel(label=name, probability=probability, index=index)
