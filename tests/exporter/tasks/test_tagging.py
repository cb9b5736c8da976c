"""The tagged sentences, and one whole training that must reach its target."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from exporter.checkpoint import load_checkpoint
from exporter.tasks.tagged_sentences import TAGS
from exporter.tasks.tagging import draw_sentences, make_tokenizer, part_of, tagging_task
from exporter.tasks.train import train


def test_words_have_more_than_one_tag() -> None:
    tags: dict[str, set[str]] = {}
    for sentence in draw_sentences(random.Random(0), 5000, part="training"):
        for word, tag in sentence:
            tags.setdefault(word, set()).add(tag)

    assert tags["saw"] == {"NOUN", "VERB"}
    assert tags["can"] == {"AUX", "NOUN", "VERB"}
    assert tags["will"] >= {"AUX", "NOUN", "PROPN"}
    assert tags["her"] == {"DET", "PRON"}
    assert tags["to"] == {"ADP", "PART"}
    assert set().union(*tags.values()) == set(TAGS)


def test_no_sentence_is_in_two_parts() -> None:
    for part in ("training", "validation", "held out"):
        assert {part_of(s) for s in draw_sentences(random.Random(0), 200, part=part)} == {part}


def test_a_token_is_a_word_and_an_unknown_word_is_one_too() -> None:
    encoding = make_tokenizer().encode("I saw Zaphod's SAW!")

    assert encoding.tokens == ["i", "saw", "[UNK]", "[UNK]", "[UNK]", "saw", "!"]
    assert encoding.offsets[-2:] == [(15, 18), (18, 19)]


def test_a_sentence_has_one_label_a_token() -> None:
    for example in tagging_task(0).held_out[:100]:
        assert example.source.shape == example.target.shape


@pytest.mark.long
def test_training_reaches_its_target_and_tells_a_saw_from_seeing(tmp_path: Path) -> None:
    report = train("tagging", tmp_path / "run", progress=False)

    assert report.target_reached, report.summary
    assert report.metrics["label_accuracy"] >= 0.99
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.tokenizer is not None
    for text, expected in report.samples:
        ids = torch.tensor([checkpoint.tokenizer.encode(text).ids])
        with torch.no_grad():
            found = checkpoint.model(ids, None).logits[0].argmax(-1).tolist()
        assert " ".join(TAGS[i] for i in found) == expected
