"""Hugging Face `generate` on the eager model."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from loadtest.lab.peers.worker import LoadOptions, Prompts


def load_model(options: LoadOptions) -> Any:
    """Load the original's model in float32."""
    original = Path(options.directory) / "original"
    torch.set_num_threads(options.num_threads)
    is_seq2seq = AutoConfig.from_pretrained(original).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    return kind.from_pretrained(original, dtype=torch.float32).eval()


def torch_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {name: version(name) for name in ("torch", "transformers")}


class HuggingFaceAdapter:
    """`generate` with its own dynamic cache."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = torch_versions()
        self._model = load_model(options)
        self._num_beams = options.num_beams

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch."""
        ids = torch.tensor(prompts)
        eos = self._model.generation_config.eos_token_id
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            eos_token_id=eos,
            do_sample=False,
            num_beams=self._num_beams,
        )
        rows: list[list[int]] = out[:, -num_new_tokens:].tolist()
        return rows


def load(options: LoadOptions) -> HuggingFaceAdapter:
    """Load the original."""
    return HuggingFaceAdapter(options)
