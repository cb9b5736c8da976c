"""torch eager with a static cache: the plainest fast loop over a Hugging Face decoder."""

from __future__ import annotations

import torch
from transformers import StaticCache

from loadtest.lab.peers.adapters.huggingface import load_model, torch_versions
from loadtest.lab.peers.worker import LoadOptions, Prompts


class EagerAdapter:
    """Greedy search with keys and values written in place."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = torch_versions()
        self._model = load_model(options)
        self._max_tokens = options.max_tokens

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch."""
        ids = torch.tensor(prompts)  # (B, S)
        num_prompt = ids.shape[1]
        cache = StaticCache(config=self._model.config, max_cache_len=self._max_tokens)
        positions = torch.arange(num_prompt)
        chosen = []
        for step in range(num_new_tokens):
            logits = self._model(
                input_ids=ids,
                position_ids=positions.expand(len(prompts), -1),
                cache_position=positions,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits  # (B, 1, V)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            positions = torch.tensor([num_prompt + step])
            chosen.append(ids)
        rows: list[list[int]] = torch.cat(chosen, 1).tolist()
        return rows


load = EagerAdapter
