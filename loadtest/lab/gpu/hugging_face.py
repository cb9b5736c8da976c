"""Hugging Face's model of a shape on the same device: `generate`, compiled, or torch eager.

Weights are drawn on the device: they are others than ours, as time does not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch

from loadtest.lab.gpu.models import shape_of
from loadtest.lab.peers.adapters.huggingface import HuggingFaceAdapter
from loadtest.lab.peers.worker import LoadOptions

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load(options: LoadOptions) -> HuggingFaceAdapter:
    """Draw the model that `weights` names: shape, precision and mode.

    In the mode "static" `generate` has a static cache: it compiles and captures steps, which the
    first two batches bring about. Raises RuntimeError if torch has no such device.
    """
    import transformers  # here, for it takes seconds

    shape, precision, mode = options.weights.split(" ")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    setting = options.setting
    config = transformers.AutoConfig.for_model(**shape_of(shape, quick=bool(setting["quick"])))
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = getattr(transformers, kind).from_config(config, dtype=_DTYPES[precision])
    cache = {"cache_implementation": "static"} if mode == "static" else {}
    adapter = HuggingFaceAdapter(model.eval(), pad_token_id=1, **cache)
    num_prompt = setting["num_prompt_tokens"]
    for _ in range(2):
        prompts = [[2] * num_prompt for _ in range(options.max_concurrency)]
        adapter.generate(prompts, options.max_tokens - num_prompt)
    return adapter
