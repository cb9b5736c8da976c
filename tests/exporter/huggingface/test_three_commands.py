"""From a downloaded directory to a streamed answer: import, export, serve, as READMEs show it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenweir import Client
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.models.marian.tokenization_marian import MarianTokenizer

from tests.exporter.huggingface.lines import difficult_lines
from tests.exporter.huggingface.sources import save_llama, save_marian
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import lay_out_marian, train_spm
from tests.fakes.served import served, typed

LINES = [line for line in difficult_lines(2000, seed=1) if line.isascii()]
TEXTS = ["the quick brown fox", "a lazy dog, and 17 more"]
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<me>"


class Downloaded(NamedTuple):
    """A directory as a model is published, and what transformers makes of it."""

    model: Any
    tokenizer: Any

    def answer(self, ids: list[int]) -> str:
        """Return what `generate` writes behind ids, as text."""
        given = torch.tensor([ids])
        written = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12
        )[0]
        is_translated = self.model.config.is_encoder_decoder
        new = written[1:] if is_translated else written[len(ids) :]
        text: str = self.tokenizer.decode(new, skip_special_tokens=True)
        return self._with_its_ends(text, new) if is_translated else text

    def _with_its_ends(self, text: str, ids: Any) -> str:
        """Return it with the spaces that a Marian tokenizer cuts off, but for one in front."""
        pieces = "".join(self.tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True))
        whole = pieces.replace("\u2581", " ")
        assert whole.strip(" ") == text
        return whole.removeprefix(" ")


def llama(path: Path) -> Downloaded:
    """Save a Llama in several files, with a SentencePiece model and a chat template."""
    path.mkdir()
    options = {"vocab_size": 560, "model_type": "bpe", "byte_fallback": True}
    pieces = train_spm(path / "tokenizer.model", LINES, **options)
    twin = save_llama(
        path, vocab_size=len(pieces), bos_token_id=1, eos_token_id=2, max_position_embeddings=128
    )
    (path / "tokenizer.json").unlink()
    (path / "model.safetensors").unlink()
    twin.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    named = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    settings = {**named, "chat_template": CHAT}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **tokens}))
    return Downloaded(twin, LlamaTokenizer.from_pretrained(path))


def opus_mt(path: Path) -> Downloaded:
    """Save a Marian model with its two SentencePiece models and its vocabulary."""
    path.mkdir()
    size = lay_out_marian(path, LINES, vocab_size=120)
    ids = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1, "eos_token_id": 0}
    twin = save_marian(path, vocab_size=size, num_beams=4, max_position_embeddings=64, **ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    return Downloaded(twin, MarianTokenizer.from_pretrained(path))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("download", [llama, opus_mt])
def test_three_commands_lead_to_a_streamed_answer(
    download: Callable[[Path], Downloaded], tmp_path: Path
) -> None:
    there = download(tmp_path / "downloaded")

    typed(tmp_path, "import", "downloaded", "--out", "checkpoint", "--max-len", "64")
    typed(tmp_path, "export", "checkpoint", "--out", "mine")
    with served(tmp_path, "mine") as client:
        answers = ["".join(client.stream("mine", text, max_new_tokens=12)) for text in TEXTS]
        told = _chat(client) if download is llama else None

    assert answers == [there.answer(there.tokenizer(text).input_ids) for text in TEXTS]
    assert len(set(answers)) == len(TEXTS)
    if told is not None:
        ids = there.tokenizer("<s><user> hello <me>", add_special_tokens=False).input_ids
        assert told == there.answer(ids)


def _chat(client: Client) -> str:
    messages = [{"role": "user", "content": "hello"}]
    return "".join(client.stream("mine", messages, max_new_tokens=12))
