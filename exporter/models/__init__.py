"""The eager models: four architectures on one set of blocks, and decoders by their own code."""

from __future__ import annotations

from torch import nn

from exporter.models.bert import Bert
from exporter.models.config import ImageConfig, RotaryScaling, TransformerConfig
from exporter.models.layers import EncoderOutput
from exporter.models.transformer import GPT, EncoderDecoder
from exporter.models.transformers_model import TransformersModel
from exporter.models.vit import ViT

__all__ = [
    "GPT",
    "Bert",
    "EncoderDecoder",
    "EncoderOutput",
    "ImageConfig",
    "RotaryScaling",
    "TransformerConfig",
    "ViT",
    "build_model",
]


def build_model(config: TransformerConfig) -> nn.Module:
    """Return a model of the architecture that `config` names, with freshly drawn weights."""
    match config.architecture:
        case "encoder-decoder":
            return EncoderDecoder(config)
        case "decoder":
            return GPT(config) if config.code is None else TransformersModel(config)
        case "encoder":
            return Bert(config)
        case "vision-encoder":
            return ViT(config)
