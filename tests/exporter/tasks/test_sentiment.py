"""The opinions, and how they are framed for BERT."""

from __future__ import annotations

import random

from exporter.tasks.opinions import NEGATIVE, POSITIVE
from exporter.tasks.sentiment import draw_texts, make_tokenizer, part_of, sentiment_task


def test_the_same_adjective_is_praise_and_blame() -> None:
    labels: dict[str, set[str]] = {}
    for text, label in draw_texts(random.Random(0), 5000, part="training"):
        for word in ("good", "boring", "not", "but", "loved"):
            if word in text.lower().split():
                labels.setdefault(word, set()).add(label)

    assert all(labels[word] == {POSITIVE, NEGATIVE} for word in labels)


def test_labels_are_balanced() -> None:
    texts = draw_texts(random.Random(0), 2000, part="training")

    assert 0.45 < sum(label == POSITIVE for _, label in texts) / 2000 < 0.55


def test_no_text_is_in_two_parts() -> None:
    for part in ("training", "validation", "held out"):
        assert {part_of(t) for t, _ in draw_texts(random.Random(0), 200, part=part)} == {part}


def test_texts_and_pairs_are_framed_as_bert_wants_them() -> None:
    tokenizer = make_tokenizer()

    single, pair = tokenizer.encode("Not good!"), tokenizer.encode("good", "bad")

    assert single.tokens == ["[CLS]", "not", "good", "!", "[SEP]"]
    assert pair.tokens == ["[CLS]", "good", "[SEP]", "bad", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]


def test_texts_fit_the_model() -> None:
    task = sentiment_task(0)

    longest = max(len(example.source) for example in task.chunks(0))

    assert longest <= task.config.max_source_len
    assert len(task.held_out) == 1000
