"""Hugging Face `generate` on the eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.origin import versions_of


def load_model(options: LoadOptions) -> Any:
    """Load the original's model in float32."""
    original = Path(options.directory) / "original"
    torch.set_num_threads(options.num_threads)
    is_seq2seq = AutoConfig.from_pretrained(original).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    return kind.from_pretrained(original, dtype=torch.float32).eval()


def torch_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return versions_of("torch", "transformers")


class HuggingFaceAdapter:
    """`generate` with its own dynamic cache, or as the options say."""

    def __init__(self, model: Any, **options: object) -> None:
        self.versions = torch_versions()
        self._model, self._options = model, options

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch."""
        ids = torch.tensor(prompts, device=self._model.device)  # (B, S)
        with torch.inference_mode(ids.is_cpu):  # a compiled model takes no tensors of that mode
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                **self._options,
            )
        rows: list[list[int]] = out[:, -num_new_tokens:].tolist()
        return rows


def load(options: LoadOptions) -> HuggingFaceAdapter:
    """Load the original."""
    model = load_model(options)
    eos = model.generation_config.eos_token_id
    return HuggingFaceAdapter(model, eos_token_id=eos, num_beams=options.num_beams)
