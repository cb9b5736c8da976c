"""The models must trace with batch and length left open: no branch on the value of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from exporter.models import build_model
from exporter.models.cache import LayerCache
from exporter.operators.cross_attention import SourceRow


class EncoderStep(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, lengths: Tensor) -> list[Tensor]:
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        memory = self.model.encode(input_ids, mask)
        return [x for pair in self.model.decoder.cross_key_values(memory) for x in pair]


class DecoderStep(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_seq: Tensor,
        past: list[Tensor],
        cross: list[Tensor],
        source_lengths: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        pairs = zip(past[0::2], past[1::2], cross[0::2], cross[1::2], strict=True)
        caches = [
            LayerCache(
                key,
                value,
                seqlens_k,
                total_seq,
                position_ids,
                SourceRow.one_each(ck, cv, source_lengths),
            )
            for key, value, ck, cv in pairs
        ]
        logits = self.decoder(input_ids, position_ids=position_ids, caches=caches)
        return logits, [row for cache in caches for row in (cache.key, cache.value)]


def decoder_inputs(batch: int, length: int, start: int) -> dict[str, object]:
    position_ids = (start + torch.arange(length)).expand(batch, length)
    return {
        "input_ids": torch.randint(0, 29, (batch, length)),
        "position_ids": position_ids,
        "seqlens_k": torch.full((batch,), start + length - 1, dtype=torch.int32),
        "total_seq": torch.tensor([start + length], dtype=torch.int32),
        "past": [torch.randn(batch, 2, 12, 16) for _ in range(4)],
        "cross": [torch.randn(batch, 2, 14, 16) for _ in range(4)],
        "source_lengths": torch.arange(1, batch + 1),
    }


@pytest.fixture
def model(translation_config, randomize) -> nn.Module:
    options = {"key_dim": 5, "value_dim": 11}
    return randomize(build_model(translation_config.model_copy(update=options)))


@torch.no_grad()
def test_encoder_traces_with_open_batch_and_length(model):
    step = EncoderStep(model)
    batch, length = Dim("batch"), Dim("length", max=14)
    example = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "lengths": torch.tensor([5, 3])}

    program = torch.export.export(
        step,
        (),
        example,
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "lengths": {0: batch}},
    )

    other = {"input_ids": torch.randint(0, 29, (3, 14)), "lengths": torch.tensor([14, 1, 9])}
    torch.testing.assert_close(program.module()(**other), step(**other))


@torch.no_grad()
def test_decoder_with_a_cache_traces_with_open_batch_and_length(model):
    step = DecoderStep(model)
    batch, length = Dim("batch"), Dim("length", max=12)
    rows = {0: batch}

    program = torch.export.export(
        step,
        (),
        decoder_inputs(batch=2, length=3, start=2),
        dynamic_shapes={
            "input_ids": {0: batch, 1: length},
            "position_ids": {0: batch, 1: length},
            "seqlens_k": rows,
            "total_seq": {},
            "past": [rows] * 4,
            "cross": [rows] * 4,
            "source_lengths": rows,
        },
    )

    for shape in ((3, 1, 7), (4, 5, 0)):
        inputs = decoder_inputs(*shape)
        torch.testing.assert_close(program.module()(**inputs), step(**inputs))
