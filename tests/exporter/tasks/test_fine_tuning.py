"""A model that was imported learns from pairs of one's own."""

from __future__ import annotations

from pathlib import Path

from transformers.models.marian import MarianConfig, MarianMTModel

from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from exporter.tasks import build_own_task
from exporter.tasks.own.data import OwnData
from exporter.training.trainer import train
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import lay_out_marian


def test_a_model_of_opus_mt_is_trained_with_its_two_tokenizers(tmp_path: Path) -> None:
    source, pairs = tmp_path / "source", tmp_path / "pairs.tsv"
    source.mkdir()
    rows = [(f"number {i}", f"la {i}. ligne") for i in range(300)]
    texts = [text for row in rows for text in row]  # in turns, a side each
    num_ids = lay_out_marian(source, texts, vocab_size=60)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=num_ids,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=64,
            pad_token_id=num_ids - 1,
            decoder_start_token_id=num_ids - 1,
            eos_token_id=0,
            forced_eos_token_id=0,
        )
    )
    model.generation_config.bad_words_ids = [[num_ids - 1]]
    model.save_pretrained(source)
    pairs.write_text("".join(f"{one}\t{other}\n" for one, other in rows))
    import_checkpoint(source, tmp_path / "imported")
    data = OwnData(pairs, start=load_checkpoint(tmp_path / "imported"))

    report = train(
        lambda seed: build_own_task("translation", data, seed=seed),
        tmp_path / "tuned",
        steps=2,
    )

    tuned, start = load_checkpoint(tmp_path / "tuned"), data.start
    assert start is not None and tuned.target_tokenizer is not None
    assert tuned.target_tokenizer is not tuned.tokenizer
    assert start.config.generation.banned_tokens == (num_ids - 1,)
    assert tuned.config.generation == start.config.generation
    task = build_own_task("translation", data)
    example, (_, target) = task.held_out[0], task.samples[0]
    assert tuned.target_tokenizer.decode(example.target.tolist()) == target
    assert example.target[-1] == 0 and 0 not in example.target[:-1]
    assert report.metrics["loss"] < 20
