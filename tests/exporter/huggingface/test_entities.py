"""Entities are those of the token classification of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenweir
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline

from engine.text import tokenizer as engine_tokenizer
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from server.worker.entities import find_entities
from tests.exporter.huggingface.encoders import LABELS, save_encoder
from tests.exporter.huggingface.encoders import tokenizer as word_pieces

NAMES = tuple(LABELS["id2label"].values())
TEXTS = [
    "Alex is in New York.",
    "new york, new yorks farther  from Berlin",
    "sunday sun day, microsoft",
    "Québec in Berlin, the farther Yorks",
    "alex",
    "Alex is from ber\u00adlin, new\u00ad yorks",  # hyphens that the tokenizer drops
]
STRATEGIES: tuple[tokenweir.Aggregation, ...] = ("simple", "first", "average", "max")


def with_spaces() -> Tokenizer:
    """Return a tokenizer whose vocabulary does not mark what goes on with a word."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((f"▁{w}", -3.0) for w in ("new", "york", "is", "in"))]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyzABNYQ.,"]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def make_pipeline(model: Any, tokenizer: Tokenizer, unknown: str) -> Any:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)
    return TokenClassificationPipeline(model=model, tokenizer=wrapped)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("tokenizer", "unknown"), [(word_pieces(), "[UNK]"), (with_spaces(), "<unk>")]
)
def test_entities_are_those_of_the_pipeline(
    strategy: tokenweir.Aggregation, tokenizer: Tokenizer, unknown: str, tmp_path: Path
) -> None:
    pipeline = make_pipeline(save_encoder(tmp_path / "source", "bert", "label"), tokenizer, unknown)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = engine_tokenizer.Tokenizer(tmp_path / "tokenizer.json")
    aggregation = pipeline._sanitize_parameters(aggregation_strategy=strategy)[2]
    rng = np.random.default_rng(0)

    for text in TEXTS * 8:
        found = tokenizer.encode(text)
        probabilities = rng.dirichlet(np.full(len(NAMES), 0.5), len(found.ids))
        their_own = pipeline.gather_pre_entities(
            text,
            np.array(found.ids),
            probabilities,
            found.offsets,
            np.array(found.special_tokens_mask),
            **aggregation,
        )
        grouped = pipeline.aggregate(their_own, **aggregation)
        expected = [entity for entity in grouped if entity["entity_group"] != "O"]

        encoding = ours.encode_with_offsets(text)
        kept = [i for i, special in enumerate(encoding.special) if not special]
        entities = find_entities(
            probabilities[kept],
            [encoding.offsets[i] for i in kept],
            [encoding.continues[i] for i in kept],
            NAMES,
            strategy,
        )

        assert [(e.label, e.start, e.end) for e in entities] == [
            (e["entity_group"], *_bytes(text, e["start"], e["end"])) for e in expected
        ]
        assert [e.probability for e in entities] == pytest.approx([e["score"] for e in expected])


def test_served_entities_are_those_of_the_pipeline(tmp_path: Path) -> None:
    source, checkpoint, package = (tmp_path / name for name in ("source", "checkpoint", "ner"))
    twin = save_encoder(source, "bert", "label", num_hidden_layers=1)
    pipeline = make_pipeline(twin, word_pieces(), "[UNK]")
    import_checkpoint(source, checkpoint)
    export_package(checkpoint, package)

    with tokenweir.load(package) as client:
        for text in TEXTS[:2]:
            for strategy in STRATEGIES:
                found = client.label("ner", text, aggregation=strategy).spans
                expected = pipeline(text, aggregation_strategy=strategy)
                assert [(span.text, span.label.label) for span in found] == [
                    (text[e["start"] : e["end"]], e["entity_group"]) for e in expected
                ]
                assert [span.label.probability for span in found] == pytest.approx(
                    [e["score"] for e in expected], abs=1e-4
                )
            tokens = client.label("ner", text).spans
            assert len(tokens) == len(word_pieces().encode(text).ids) - 2
        with pytest.raises(ValueError, match="aggregation='best' must be one of simple, first"):
            client.label("ner", "alex", aggregation="best")  # type: ignore[arg-type]


def _bytes(text: str, start: int, end: int) -> tuple[int, int]:
    return len(text[:start].encode()), len(text[:end].encode())
