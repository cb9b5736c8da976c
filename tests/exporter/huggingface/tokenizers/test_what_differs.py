"""Texts that a package reads or writes otherwise than transformers, as the page counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.m2m_100.tokenization_m2m_100 import M2M100Tokenizer
from transformers.models.marian.tokenization_marian import MarianTokenizer

from exporter.huggingface.tokenizers import Languages
from tests.exporter.huggingface.lines import difficult_lines
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import (
    TRAINING,
    lay_out_marian,
    read,
    train_spm,
    write_json,
)
from tests.exporter.huggingface.tokenizers.test_tokenizers import SEVERAL, equally_likely
from tests.exporter.huggingface.translation_sources import save

NUM_LINES = 10_000
PAGE = Path(__file__).parents[4] / "exporter" / "docs" / "reference" / "tokenizers.md"


def quoted(sentence: str) -> bool:
    """Say whether the page has a sentence."""
    return sentence in " ".join(PAGE.read_text().split())


def num_otherwise(decode: Callable[[list[int]], str], other: Callable[[list[int]], str],
                  texts: list[list[int]]) -> int:  # fmt: skip
    """Return how many texts have other spaces at their ends; the rest of each is the same."""
    pairs = [(decode(ids), other(ids)) for ids in texts]
    assert all(one.strip() == two.strip() for one, two in pairs)
    return sum(one != two for one, two in pairs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_marian_differs_in_ties_in_two_characters_and_in_spaces_at_ends(tmp_path: Path) -> None:
    lay_out_marian(tmp_path, TRAINING, normalization_rule_name="nmt_nfkc")
    original, lines = MarianTokenizer.from_pretrained(tmp_path), difficult_lines(NUM_LINES, seed=4)

    found = read(tmp_path, model_type="marian")
    target = found.files.target_tokenizer

    assert found.tokenizer is not None and target is not None
    ties, composed = [], set()
    for tokenizer, model, name in (
        (found.tokenizer, original.spm_source, "text"),
        (target, original.spm_target, "text_target"),
    ):
        ties.append(0)
        for line in lines:
            made = tokenizer.encode(line)
            if made.ids == original(**{name: line}).input_ids:
                continue
            if SEVERAL & set(line):
                composed.add(line)
                continue
            pieces = model.piece_to_id(made.tokens[:-1])
            assert equally_likely(model, pieces, model.encode(line)), line
            ties[-1] += 1
    told = [original(text_target=line).input_ids for line in lines]
    spaces = num_otherwise(
        target.decode, lambda ids: original.decode(ids, skip_special_tokens=True), told
    )
    with_either = sum(bool(SEVERAL & set(line)) for line in lines)
    assert quoted(f"{ties[0]} of 10,000 sources and {ties[1]} of as many targets")
    assert quoted(f"{len(composed)} of {with_either} lines that have U+0344 or U+0149")
    assert quoted(f"{spaces} of 10,000 answers of a Marian")


@pytest.mark.long
def test_an_m2m100_differs_in_spaces_at_ends_alone(tmp_path: Path) -> None:
    pieces = train_spm(tmp_path / "sentencepiece.bpe.model", TRAINING, model_type="bpe")
    names = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *pieces])
    write_json(tmp_path / "vocab.json", {name: i for i, name in enumerate(names)})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    original = M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de", tgt_lang="fr")
    lines = difficult_lines(NUM_LINES, seed=4)

    tokenizer = read(tmp_path, languages=Languages("de", "fr")).tokenizer

    assert tokenizer is not None
    told = [original(line).input_ids for line in lines]
    assert [tokenizer.encode(line).ids for line in lines] == told
    told = [ids[1:] for ids in told]  # without the language
    texts = [original.decode(ids, skip_special_tokens=True) for ids in told]
    spaces = num_otherwise(
        tokenizer.decode, lambda ids: original.decode(ids, skip_special_tokens=True), told
    )
    cleaned = [original.clean_up_tokenization(text) for text in texts]
    changed = sum(one != other for one, other in zip(texts, cleaned, strict=True))
    assert quoted(f"and {spaces:,} of an M2M-100")
    assert quoted(f"removes them in {changed} of these 10,000")


@torch.no_grad()
def test_an_m2m100_writes_no_padding(tmp_path: Path) -> None:
    model = save("m2m_100", tmp_path)
    padding, vocab_size = model.config.pad_token_id, model.config.vocab_size
    torch.manual_seed(0)
    sources = torch.randint(4, vocab_size, (64, 8))

    written = [
        model.generate(one[None], max_new_tokens=16, do_sample=False, num_beams=1)[0, 1:]
        for one in sources
    ]

    assert not any((one == padding).any() for one in written)
    assert quoted(f"none of the {sum(map(len, written))} tokens")
