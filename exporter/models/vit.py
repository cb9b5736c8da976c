"""ViT: an encoder over the patches of an image (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import ImageConfig, TransformerConfig
from exporter.models.heads import make_classifier, to_unit_length
from exporter.models.layers import Encoder, EncoderOutput
from exporter.models.positions import INIT_STD, make_positions


class PatchEmbeddings(nn.Module):
    """An image as a sequence: a class token, then its patches in reading order, plus positions.

    DeiT has a distillation token behind the class token.
    """

    def __init__(self, config: TransformerConfig, image: ImageConfig) -> None:
        super().__init__()
        self.projection = nn.Conv2d(
            image.channels, config.d_model, kernel_size=image.patch_size, stride=image.patch_size
        )
        nn.init.xavier_uniform_(self.projection.weight.view(config.d_model, -1))
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        self.class_token = nn.Parameter(torch.empty(config.d_model))
        nn.init.normal_(self.class_token, std=INIT_STD)
        self.distillation_token: nn.Parameter | None = None
        if image.distillation != "none":
            self.distillation_token = nn.Parameter(torch.empty(config.d_model))
            nn.init.normal_(self.distillation_token, std=INIT_STD)
        positions = make_positions(config, image.num_tokens)
        assert positions is not None, "TransformerConfig keeps rotary positions to gpt"
        self.positions = positions
        self.dropout = nn.Dropout(config.dropout)
        self.patches_as_product = False

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map (B, channels, size, size) to (B, num_tokens, d_model)."""
        project = self._multiply if self.patches_as_product else self._convolve
        patches = project(pixel_values)  # (B, num_patches, d_model)
        hidden = patches
        if self.distillation_token is not None:
            hidden = _behind(self.distillation_token, hidden)
        hidden = _behind(self.class_token, hidden)
        output: Tensor = self.dropout(hidden + self.positions.first(hidden.shape[1]))
        return output

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


def _behind(token: Tensor, hidden: Tensor) -> Tensor:
    """Put a token (d_model,) before the others; in a graph no node of it is about shapes."""
    places = torch.arange(hidden.shape[1] + 1, device=hidden.device)
    moved = hidden.index_select(1, (places - 1).clamp(min=0))
    return torch.where((places == 0)[:, None], token, moved)


class ViT(nn.Module):
    """Classifies an image of a fixed size by its class token, and its distillation token if any.

    Without labels it gives the vector of the class token only.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.image is not None, "TransformerConfig demands it of a vit"
        self.config = config
        self.embeddings = PatchEmbeddings(config, config.image)
        self.encoder = Encoder(config)
        self.classifier = make_classifier(config)
        self.distillation_classifier = (
            make_classifier(config) if config.image.distillation == "head" else None
        )

    def multiply_patches(self) -> None:
        """Let patches be rows of a product, and of no convolution, which gives the same."""
        self.embeddings.patches_as_product = True

    def forward(self, pixel_values: Tensor) -> EncoderOutput:
        """Return logits (B, num_labels), if there are labels, and the class token (B, d_model).

        pixel_values float32 (B, channels, size, size) = (pixel / 255 - mean) / std.
        """
        hidden = self.encoder(self.embeddings(pixel_values))  # (B, num_tokens, d_model)
        class_token = hidden[:, 0]  # (B, d_model)
        logits = None if self.classifier is None else self.classifier(class_token)
        if self.distillation_classifier is not None and logits is not None:
            logits = (logits + self.distillation_classifier(hidden[:, 1])) / 2
        vector = to_unit_length(class_token) if self.config.head.normalize else class_token
        return EncoderOutput(logits, vector)
