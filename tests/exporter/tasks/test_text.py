"""The user's own text: read, split, cut into windows, and held against a trigram model."""

from __future__ import annotations

import math
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.errors import ConfigError
from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from exporter.tasks import build_task
from exporter.tasks.text import (
    AddOneTrigram,
    make_tokenizer,
    passages,
    read_files,
    split,
    text_task,
    windows,
)
from exporter.training.trainer import train
from tests.exporter.huggingface.sources import save_gpt2, save_marian


@pytest.fixture
def story(tmp_path: Path) -> Path:
    rng = random.Random(0)
    words = ["the", "cat", "dog", "sat", "on", "a", "mät", "ran", "under", "tree"]
    lines = [" ".join(rng.choices(words, k=8)) + "." for _ in range(1500)]
    (tmp_path / "story.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "story.txt"


def test_the_add_one_trigram_model_is_a_distribution() -> None:
    model = AddOneTrigram([0, 1, 2, 0, 1, 3, 0, 1, 2], vocab_size=5)

    assert model.probability(0, 1, 2) == pytest.approx((2 + 1) / (3 + 5))
    assert model.probability(4, 4, 4) == pytest.approx(1 / 5)
    for pair in [(0, 1), (1, 2), (2, 2)]:
        assert sum(model.probability(*pair, third) for third in range(5)) == pytest.approx(1.0)


def test_the_trigram_model_scores_every_token_but_the_first() -> None:
    model = AddOneTrigram([0, 1], vocab_size=4)

    assert model.negative_log_likelihood([2, 3, 3]) == pytest.approx(2 * math.log(4))


def test_passages_together_are_the_text() -> None:
    text = "".join(f"line {i} is here\n" for i in range(2000)) + "ü" * 9000

    found = passages(text)

    assert "".join(found) == text
    assert len(found) > 5
    assert max(len(p.encode()) for p in found) < 3 * 4096


def test_no_passage_is_in_two_parts_even_if_it_occurs_twice() -> None:
    parts = split([f"passage {i % 30}" for i in range(60)])

    assert sorted(p for part in parts.values() for p in part) == sorted(
        f"passage {i}" for i in range(30)
    )
    assert len(parts["held out"]) == 3


def test_windows_make_every_token_a_target_once() -> None:
    ids = list(range(300))

    found = windows(ids)

    assert [t for e in found for t in e.target.tolist()] == ids[1:]
    assert [s for e in found for s in e.source.tolist()] == ids[:-1]


def test_the_tokenizer_gives_any_text_back_unchanged(story: Path) -> None:
    tokenizer = make_tokenizer([story.read_text("utf-8")])

    for text in ("the cat", " mät\n\n  日本 🙂", "\tdef f(x):"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_prints_both_perplexities_per_byte(tmp_path: Path, story: Path) -> None:
    report = train(partial(build_task, "text", files=[story]), tmp_path / "run", steps=3)

    ours, theirs = (
        report.metrics[name] for name in ("perplexity_per_byte", "trigram_perplexity_per_byte")
    )
    assert 1 < theirs < 10
    assert f"{ours:.3f}" in report.summary and f"{theirs:.3f}" in report.summary
    assert report.target_reached == (ours < theirs)


def test_a_resumed_run_must_have_the_same_files(tmp_path: Path, story: Path) -> None:
    train(partial(build_task, "text", files=[story]), tmp_path / "run", steps=1)
    story.write_text(story.read_text("utf-8") + "one line more\n", encoding="utf-8")

    with pytest.raises(Exception, match="other data"):
        train(
            partial(build_task, "text", files=[story]),
            tmp_path / "run",
            resume=True,
        )


def test_an_imported_model_goes_on_to_learn_with_its_own_tokenizer(
    tmp_path: Path, story: Path
) -> None:
    train(partial(build_task, "text", files=[story]), tmp_path / "byte", steps=1)
    words = load_checkpoint(tmp_path / "byte").tokenizer
    assert words is not None
    source = tmp_path / "source"
    save_gpt2(source, vocab_size=words.get_vocab_size(), bos_token_id=0, eos_token_id=0)
    words.save(str(source / "tokenizer.json"))
    import_checkpoint(source, tmp_path / "first")
    start = load_checkpoint(tmp_path / "first")

    task = text_task(0, [story], start)
    report = train(lambda _: task, tmp_path / "second", steps=2)

    assert max(len(example.source) for example in task.held_out) == 20  # all of its positions
    assert task.recipe.peak_learning_rate == pytest.approx(2e-4)
    second = load_checkpoint(tmp_path / "second")
    assert start.tokenizer is not None and second.tokenizer is not None
    assert second.tokenizer.to_str() == start.tokenizer.to_str()
    assert second.tokenizer.get_vocab() == words.get_vocab()
    for name, weight in second.model.named_parameters():
        assert torch.allclose(weight, start.model.get_parameter(name), atol=2e-3)
    assert "perplexity per byte" in report.summary


def test_a_start_that_does_not_go_on_with_texts_is_refused(tmp_path: Path, story: Path) -> None:
    save_marian(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "first")

    with pytest.raises(ConfigError, match="encoder-decoder, this task starts from decoder; give"):
        text_task(0, [story], load_checkpoint(tmp_path / "first"))


def test_passages_end_with_lines_alone_and_no_mark_begins_a_text(tmp_path: Path) -> None:
    line = "a line\u2028of the same\x85text\x0c\n"
    (tmp_path / "text").write_text("\ufeff" + line * 1000)

    text = read_files([tmp_path / "text"])

    assert text == line * 1000
    assert all(passage.endswith("\n") for passage in passages(text))


def test_files_that_cannot_be_used_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 10_000)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "small").write_text("hello")

    with pytest.raises(ConfigError, match=r"latin cannot be read: byte 0xe9 in line 1 is not UTF"):
        read_files([tmp_path / "latin"])
    with pytest.raises(ConfigError, match="the files hold 0 bytes of text, at least 20,000"):
        read_files([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="5 bytes of text"):
        read_files([tmp_path / "small"])
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file"):
        read_files([tmp_path / "nowhere"])
    os.truncate(tmp_path / "small", 40 * 2**30)
    with pytest.raises(ConfigError, match="small cannot be read: it has more than 268,435,456 b"):
        read_files([tmp_path / "small"])
    with pytest.raises(ConfigError, match="text needs one or more UTF-8 files"):
        text_task(0, [])
