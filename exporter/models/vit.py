"""ViT: an encoder over the patches of an image (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exporter.models.config import ImageConfig, TransformerConfig
from exporter.models.embeddings import INIT_STD, make_positions
from exporter.models.layers import Encoder, EncoderOutput, make_linear


class PatchEmbeddings(nn.Module):
    """An image as a sequence: a class token, then its patches in reading order, plus positions."""

    def __init__(self, config: TransformerConfig, image: ImageConfig) -> None:
        super().__init__()
        self.projection = nn.Conv2d(
            image.channels, config.d_model, kernel_size=image.patch_size, stride=image.patch_size
        )
        nn.init.xavier_uniform_(self.projection.weight.view(config.d_model, -1))
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        self.class_token = nn.Parameter(torch.empty(config.d_model))
        nn.init.normal_(self.class_token, std=INIT_STD)
        num_patches = (image.size // image.patch_size) ** 2
        positions = make_positions(config, num_patches + 1)
        assert positions is not None, "TransformerConfig keeps rotary positions to gpt"
        self.positions = positions
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map (B, channels, size, size) to (B, 1 + num_patches, d_model)."""
        patches = self.projection(pixel_values).flatten(2).transpose(1, 2)  # (B, patches, d_model)
        class_token = self.class_token.expand(patches.shape[0], 1, -1)
        hidden = torch.cat([class_token, patches], dim=1)
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output: Tensor = self.dropout(hidden + self.positions(position_ids))
        return output


class ViT(nn.Module):
    """Classifies an image of a fixed size by the final vector of its class token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.image is not None, "TransformerConfig demands it of a vit"
        self.config = config
        self.embeddings = PatchEmbeddings(config, config.image)
        self.encoder = Encoder(config)
        self.classifier = make_linear(config.d_model, len(config.labels))

    def forward(self, pixel_values: Tensor) -> EncoderOutput:
        """Return logits (B, num_labels) and the class token (B, d_model).

        pixel_values float32 (B, channels, size, size) = (pixel / 255 - mean) / std.
        """
        class_token = self.encoder(self.embeddings(pixel_values))[:, 0]  # (B, d_model)
        return EncoderOutput(self.classifier(class_token), class_token)
