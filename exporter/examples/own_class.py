"""A decoder of your own, with squared ReLU, from its training loop to an answer."""

import sys

import tokenweir
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.own import Attend, OwnConfig, PlainAttention
from exporter.own import export_own

CONFIG = OwnConfig.generator(vocab_size=10, max_len=16, num_layers=2, num_heads=2, head_dim=16)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(10, 32), nn.Embedding(16, 32)
        self.packed, self.out = layers(32, 96), layers(32, 32)
        self.up, self.down = layers(32, 64), layers(64, 32)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.token(input_ids) + self.place(position_ids)

    def blocks(self, hidden: Tensor, attend: Attend) -> Tensor:
        for i, packed in enumerate(self.packed):
            query, key, value = packed(F.layer_norm(hidden, (32,))).chunk(3, dim=-1)
            hidden = hidden + self.out[i](attend(i, query, key, value))  # cached, when it serves
            hidden = hidden + self.down[i](F.relu(self.up[i](hidden)).square())
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token.weight)


def layers(width: int, out: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, out) for _ in range(2))


def main(out: str) -> str:
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):  # to count: 7 8 9 0 1 ...
        ids = (torch.randint(10, (32, 1)) + torch.arange(16)) % 10
        hidden = model.embed(ids[:, :-1], torch.arange(15).expand(32, 15))
        logits = model.head(model.blocks(hidden, PlainAttention(num_heads=2)))
        optimizer.zero_grad()
        F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).backward()
        optimizer.step()
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    export_own(model, CONFIG, out, tokenizer=tokenizer, name="counter", samples=["3 4 5"])
    with tokenweir.load(out) as client:  # or `tokenweir serve OUT`, and tokenweir.Client
        return client.generate("counter", "7 8", max_new_tokens=4).text


print(main(sys.argv[1])) if __name__ == "__main__" else None
