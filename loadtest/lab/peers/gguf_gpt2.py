"""Writes a GPT-2 of Hugging Face as GGUF, for llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array = NDArray[np.float32]

_LAYER = {  # theirs: ours
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def write_gguf(original: Path, out: Path, weights: str) -> None:
    """Write matrices in the given format ("F32", "Q8_0"), vectors and positions in float32."""
    config = json.loads((original / "config.json").read_text())
    writer: Any = gguf.GGUFWriter(str(out), "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    _add_tokenizer(writer, original)
    kind = getattr(gguf.GGMLQuantizationType, weights)
    for name, array in _tensors(original, config["n_layer"]):
        if array.ndim == 2 and not name.startswith("position"):
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, original: Path) -> None:
    """Write what turns tokens into text: a server answers with it, though it is asked by ids."""
    tokenizer = Tokenizer.from_file(str(original / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    end = size - 2  # behind it comes the padding; see models.py
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(token) for token in range(size)])
    kinds = [gguf.TokenType.NORMAL] * end + [gguf.TokenType.CONTROL] * 2
    writer.add_token_types(kinds)
    writer.add_token_merges(["! !"])  # the file is to have one; no text is read
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_pad_token_id(end + 1)
    writer.add_add_bos_token(False)


def _tensors(original: Path, num_layers: int) -> Iterator[tuple[str, Array]]:
    stored = load_file(original / "model.safetensors")

    def get(name: str) -> Array:
        return np.ascontiguousarray(stored[f"transformer.{name}"], np.float32)

    yield "token_embd.weight", get("wte.weight")
    yield "position_embd.weight", get("wpe.weight")
    for kind in ("weight", "bias"):
        yield f"output_norm.{kind}", get(f"ln_f.{kind}")
    for layer in range(num_layers):
        for theirs, ours in _LAYER.items():
            for kind in ("weight", "bias"):
                array = get(f"h.{layer}.{theirs}.{kind}")
                # GPT-2 stores its matrices as [in, out].
                yield f"blk.{layer}.{ours}.{kind}", np.ascontiguousarray(array.T)
