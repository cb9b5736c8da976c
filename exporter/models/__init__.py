"""The eager models: five families on one set of blocks, and decoders by their own code."""

from __future__ import annotations

from torch import nn

from exporter.models.bert import Bert
from exporter.models.config import ImageConfig, RotaryScaling, TransformerConfig
from exporter.models.gpt import GPT
from exporter.models.labeller import Labeller
from exporter.models.layers import EncoderOutput
from exporter.models.transformer import EncoderDecoder
from exporter.models.transformers_model import TransformersModel
from exporter.models.vit import ViT

__all__ = [
    "GPT",
    "Bert",
    "EncoderDecoder",
    "EncoderOutput",
    "ImageConfig",
    "Labeller",
    "RotaryScaling",
    "TransformerConfig",
    "ViT",
    "build_model",
]


def build_model(config: TransformerConfig) -> nn.Module:
    """Return a model of the family that `config` names, with freshly drawn weights."""
    match config.family:
        case "encoder-decoder":
            return EncoderDecoder(config)
        case "gpt":
            return GPT(config) if config.code is None else TransformersModel(config)
        case "bert":
            return Bert(config)
        case "labeller":
            return Labeller(config)
        case "vit":
            return ViT(config)
