"""Heads of attention: split, joined, widened, and turned by their place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def split_heads(joined: Tensor, num_heads: int) -> Tensor:
    """Turn (B, S, num_heads * d) into (B, num_heads, S, d)."""
    batch, length, width = joined.shape
    return joined.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """Turn (B, num_heads, S, d) into (B, S, num_heads * d)."""
    return heads.transpose(1, 2).flatten(2)


def pad_heads(joined: Tensor, num_heads: int, width: int) -> Tensor:
    """Widen every head with zeros: (B, S, num_heads * d) to (B, S, num_heads * width).

    Zeros change neither a dot product nor the real part of the weighted values, as long as the
    scale stays that of the narrow keys.
    """
    head_dim = joined.shape[-1] // num_heads
    if head_dim == width:
        return joined
    return merge_heads(F.pad(split_heads(joined, num_heads), (0, width - head_dim)))


def unpad_heads(joined: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Undo `pad_heads`: (B, S, num_heads * width) to (B, S, num_heads * head_dim)."""
    if joined.shape[-1] == num_heads * head_dim:
        return joined
    return merge_heads(split_heads(joined, num_heads)[..., :head_dim])


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, h, S, width) by angles that broadcast to (B, h, S, width / 2)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
