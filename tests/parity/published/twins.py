"""Random models of every family as transformers makes them, scaled so that their answers differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ViTImageProcessorPil,
)

from exporter.huggingface import FAMILIES
from loadtest.lab.peers.models import save_with_words
from tests.parity.published.shapes import FamilyShape

NUM_PROMPTS, NUM_TOKENS, NUM_BEAMS = 8, 64, 4
_PROMPT_LENGTHS = (1, 2, 5, 12, 25, 50, 50, 50)
_GAIN = 1.5  # for matrices: with the usual small ones an answer hardly depends on its text
_ABILITIES = {name: family.abilities for family in FAMILIES for name in family.model_types}
_OF_SOURCE = ("encoder_attn.v_proj", "encoder_attn.out_proj")  # in names of matrices
# In those of matrices of layers and heads; a head that is the embedding has its name.
_DRAWN = (".h.", "layers.", "layer.", ".block.", "classifier", "pooler", "head", "embed_out")


class TwinAnswers(NamedTuple):
    """The tokens that `generate` writes, so that the model need not stay in memory."""

    prompts: list[list[int]]
    answers: dict[int, list[list[int]]]  # by the number of beams; of one that writes


def make_twin(shape: FamilyShape, out: Path) -> Any:
    """Make a model of a shape, and save it at `out` with a tokenizer or the settings of images."""
    torch.manual_seed(0)
    model = _model(shape)
    _draw(model)
    model.eval()
    if _is_of_images(shape):
        model.save_pretrained(out)
        size = model.config.image_size
        ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(out)
    else:
        save_with_words(model, out)
    return model


def num_parameters(shape: FamilyShape) -> int:
    """Return how many parameters a model of a shape has, without making them."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in _model(shape).parameters())


def _model(shape: FamilyShape) -> Any:
    config = AutoConfig.for_model(shape.model_type, **shape.options)
    if _is_of_images(shape):
        kind: Any = AutoModelForImageClassification
    elif "generate" not in _ABILITIES[shape.model_type]:
        kind = AutoModelForSequenceClassification
    else:
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config)
    if shape.options.get("tie_word_embeddings") is False:
        head = model.get_output_embeddings()  # which transformers 5 ties in a T5, whatever is said
        head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def _is_of_images(shape: FamilyShape) -> bool:
    return shape.model_type in ("vit", "deit")


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Draw matrices by how many numbers they read; no bias or norm stays neutral."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.add_(0.1 * torch.randn(weight.shape))
        elif weight.ndim == 2 and weight.requires_grad and any(part in name for part in _DRAWN):
            weight.normal_(0, _spread(name, weight, model.config))


def _spread(name: str, weight: Tensor, config: Any) -> float:
    if "relative_attention_bias" in name:
        return 1.0
    inputs = weight.shape[0] if ".c_" in name else weight.shape[1]  # GPT-2's are [in, out]
    if "Attention.q." in name:  # T5's, whose scores are not scaled: its queries are smaller
        inputs *= config.d_kv
    # A gated feed-forward multiplies two of them, and with the gain in each so do their errors.
    spread: float = (1 if "DenseReluDense.wi_" in name else _GAIN) * inputs**-0.5
    # A Marian's or BART's source would drown beside the token that it wrote last.
    return 2 * spread if any(part in name for part in _OF_SOURCE) else spread


@torch.no_grad()
def answers_of(twin: Any, *, writes: bool) -> TwinAnswers:
    """Return the tokens that a model writes, greedy and, with an encoder, by beams."""
    if not (writes and twin.can_generate()):
        return TwinAnswers([], {})
    draw = torch.Generator().manual_seed(1)
    high = twin.config.vocab_size - 2
    prompts = [torch.randint(3, high, (1, n), generator=draw) for n in _PROMPT_LENGTHS]
    widths = (1, NUM_BEAMS) if twin.config.is_encoder_decoder else (1,)
    answers = {width: [_generate(twin, ids, width) for ids in prompts] for width in widths}
    return TwinAnswers([ids[0].tolist() for ids in prompts], answers)


def _generate(twin: Any, ids: Tensor, num_beams: int) -> list[int]:
    output = twin.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=NUM_TOKENS,
    )
    start = 1 if twin.config.is_encoder_decoder else ids.shape[1]
    tokens: list[int] = output[0, start:].tolist()
    return tokens
