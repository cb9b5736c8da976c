"""A plain torch.nn.Transformer that turns words round, trained by its own forward."""

import sys

import tokenweir
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.torch_transformer import TorchTransformer
from exporter.own import export_own

LETTERS = ["<end>", "<start>", *"abcdef"]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(LETTERS), 32), nn.Embedding(8, 32)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.token(ids) + self.place(position_ids)


def main(out: str) -> str:
    model = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
    embed, output = Embed(), nn.Linear(32, len(LETTERS))
    optimizer = torch.optim.Adam(nn.ModuleList([model, embed, output]).parameters(), lr=5e-3)
    places, mask = torch.arange(4).expand(64, 4), model.generate_square_subsequent_mask(4)
    for _ in range(300):
        words = torch.randint(2, len(LETTERS), (64, 3))
        source, turned = F.pad(words, (0, 1)), F.pad(words.flip(1), (0, 1))
        target = F.pad(turned[:, :-1], (1, 0), value=1)
        hidden = model(embed(source, places), embed(target, places), tgt_mask=mask)
        optimizer.zero_grad()
        F.cross_entropy(output(hidden).transpose(1, 2), turned).backward()
        optimizer.step()
    own = TorchTransformer(model, source=embed, target=embed, output=output)
    sizes = {"vocab_size": len(LETTERS), "max_source_len": 8, "max_len": 8}
    config = own.describe(**sizes, start_token_id=1, eos_token_id=0)
    export_own(own, config, out, tokenizer=tokenizer(), name="turned", samples=["fed", "cab"])
    with tokenweir.load(out) as client:  # or `tokenweir serve OUT`, and tokenweir.Client
        return client.generate("turned", "fed").text


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, LETTERS[0]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    made.add_special_tokens(LETTERS[:2])
    end = [("<end>", 0)]
    made.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=end)
    return made


print(main(sys.argv[1])) if __name__ == "__main__" else None
