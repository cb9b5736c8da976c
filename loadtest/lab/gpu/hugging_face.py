"""Hugging Face's model of a shape on the same device: `generate`, compiled, or torch eager.

Weights are drawn on the device: they are others than ours, as time does not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch

from loadtest.lab.gpu.models import shape_of
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.origin import versions_of

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class HuggingFaceAdapter:
    """A model, and whether `generate` has a static cache: it then compiles and captures steps."""

    def __init__(self, options: LoadOptions) -> None:
        """Raises RuntimeError if torch has no such device."""
        import transformers  # here, for it takes seconds

        shape, precision, mode = options.weights.split(" ")
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
        self.versions = versions_of("torch", "transformers")
        said = shape_of(shape, quick=bool(options.setting["quick"]))
        config = transformers.AutoConfig.for_model(**said)
        kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = getattr(transformers, kind).from_config(config, dtype=_DTYPES[precision])
        self._model = model.eval()
        self._options = {"cache_implementation": "static"} if mode == "static" else {}
        self._max_tokens = options.max_tokens
        self._is_warm = False

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch; the first time two more, which compile and capture."""
        for _ in range(0 if self._is_warm else 2):
            self._generate(prompts, self._max_tokens - len(prompts[0]))
        self._is_warm = True
        return self._generate(prompts, num_new_tokens)

    @torch.no_grad()
    def _generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device="cuda")  # (B, S)
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            pad_token_id=1,
            do_sample=False,
            num_beams=1,
            **self._options,
        )
        rows: list[list[int]] = out[:, -num_new_tokens:].tolist()
        return rows


def load(options: LoadOptions) -> HuggingFaceAdapter:
    """Draw the model that `weights` names: shape, precision and mode."""
    return HuggingFaceAdapter(options)
