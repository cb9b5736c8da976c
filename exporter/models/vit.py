"""ViT: an encoder over the patches of an image (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        self.patches_as_product = False  # for a target whose convolutions need another library

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map (B, channels, size, size) to (B, 1 + num_patches, d_model)."""
        project = self._multiply if self.patches_as_product else self._convolve
        patches = project(pixel_values)  # (B, num_patches, d_model)
        hidden = self._behind_class_token(patches)
        output: Tensor = self.dropout(hidden + self.positions.first(hidden.shape[1]))
        return output

    def _behind_class_token(self, patches: Tensor) -> Tensor:
        """Put the class token before the patches; in a graph no node of it is about shapes."""
        places = torch.arange(patches.shape[1] + 1, device=patches.device)
        moved = patches.index_select(1, (places - 1).clamp(min=0))
        return torch.where((places == 0)[:, None], self.class_token, moved)

    def _convolve(self, pixel_values: Tensor) -> Tensor:
        features: Tensor = self.projection(pixel_values)  # (B, d_model, rows, columns)
        return features.flatten(2).transpose(1, 2)

    def _multiply(self, pixel_values: Tensor) -> Tensor:
        """Do as `_convolve`, exactly: patches do not overlap, so each is one row of a product."""
        width = self.projection.kernel_size[0]
        channels, size = pixel_values.shape[1:3]
        rows_and_columns = (size // width, width, size // width, width)
        grid = pixel_values.reshape(-1, channels, *rows_and_columns)
        rows = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, patches, C * p * p)
        weight = self.projection.weight.flatten(1)  # (d_model, C * p * p)
        return F.linear(rows, weight, self.projection.bias)


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
