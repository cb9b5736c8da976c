"""Hugging Face's model of a shape on the same device: `generate`, compiled, and torch eager.

Weights are drawn on the device: the shape is the same, the numbers are not, as time does not
depend on them.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from loadtest.gpu_check.shapes import DTYPES, SHAPES, Shape, default_dtype
from loadtest.lab.peers.worker import LoadOptions, Prompts

_SEED = 0
_QUICK = {  # by the names that the families have for the same things
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320},
    "Llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 320},
    "seq2seq": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 320}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
}
_KINDS = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Llama": ("LlamaConfig", "LlamaForCausalLM"),
    "Marian": ("MarianConfig", "MarianMTModel"),
    "Bart": ("BartConfig", "BartForConditionalGeneration"),
}


class HuggingFaceAdapter:
    """A model and how it is run: `generate` with a static cache, or with what it does by itself.

    With a static cache `generate` compiles the decode step on a GPU, and captures it.
    """

    def __init__(self, options: LoadOptions) -> None:
        """Raises RuntimeError if torch has no such device."""
        name, mode = options.weights.split(" ")
        shape, setting = SHAPES[name], options.setting
        self.versions = {what: version(what) for what in ("torch", "transformers")}
        self._device = "cuda" if setting["cuda"] else "cpu"
        if self._device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
        self._model = _draw(shape, self._device, quick=bool(setting["quick"]))
        self._options: dict[str, Any] = {}
        if mode == "generate":
            self._options["cache_implementation"] = "static"
        self._max_tokens = options.max_tokens
        self._warm: set[int] = set()  # numbers of prompts

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch; the first time two more, which compile and capture."""
        if len(prompts) not in self._warm:
            for _ in range(2):
                self._generate(prompts, self._max_tokens - len(prompts[0]))
            self._warm.add(len(prompts))
        return self._generate(prompts, num_new_tokens)

    @torch.no_grad()
    def _generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self._device)  # (B, S)
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            do_sample=False,
            num_beams=1,
            **self._options,
        )
        rows: list[list[int]] = out[:, -num_new_tokens:].tolist()
        return rows


def load(options: LoadOptions) -> HuggingFaceAdapter:
    """Draw the model of the shape and mode in `weights`."""
    return HuggingFaceAdapter(options)


def _draw(shape: Shape, device: str, *, quick: bool) -> Any:
    import transformers  # here, for it takes seconds, and is for nothing without the device

    config_name, model_name = _KINDS[shape.family]
    quick_sizes = _QUICK.get(shape.family, _QUICK["seq2seq"]) if quick else {}
    config = getattr(transformers, config_name)(**{**shape.theirs, **quick_sizes})
    config.eos_token_id = None  # every request goes on to the asked length
    torch.manual_seed(_SEED)
    with default_dtype(DTYPES[shape.precision]), torch.device(device):
        model = getattr(transformers, model_name)(config)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
