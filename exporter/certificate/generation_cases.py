"""The cases of a model that generates: prompts, with or without a source, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from exporter.certificate.cases import MAX_STEPS, spread_lengths
from exporter.certificate.comparison import Floats, without
from exporter.samples import SEED, Deck, Tokens, random_tokens

_SCORED_LOGITS = 2**21  # wanted behind the prompt of a case, to bound the memory


@dataclass(frozen=True)
class Case:
    """A prompt, behind a source or not, and how many tokens are to follow it."""

    source: Tokens  # empty: a model without encoder
    prompt: Tokens
    num_tokens: int
    num_prompt_logits: int = 1  # the last positions of the prompt whose logits are wanted
    banned: Tokens = ()  # which do not follow, however likely they are

    @property
    def num_logits(self) -> int:
        """How many positions have logits to compare: of the prompt, and of all tokens but one."""
        return self.num_prompt_logits - 1 + self.num_tokens

    def pieces(self, chunk: int) -> tuple[list[Tokens], Tokens]:
        """Cut the prompt as the engine does: chunks, and apart a last token that stands alone."""
        step = chunk or len(self.prompt)
        pieces = [self.prompt[i : i + step] for i in range(0, len(self.prompt), step)]
        if len(pieces[-1]) > 1:
            return pieces, ()
        return pieces[:-1], pieces[-1]

    def num_computed(self, chunk: int) -> int:
        """Return how many tokens of the prompt are computed before the first decode call."""
        return sum(map(len, self.pieces(chunk)[0]))

    def num_reusable(self, chunk: int) -> int:
        """Return how many first tokens another prompt could use: whole chunks, but not all."""
        return (len(self.prompt) - 1) // chunk * chunk

    def likeliest(self, logits: Floats) -> Tokens:
        """Return the likeliest tokens by logits [N, vocab_size], none that is banned."""
        return tuple(without(self.banned, logits).argmax(axis=-1).tolist())

    def chosen(self, seen: StepLogits) -> Tokens:
        """Return the likeliest tokens that followed the prompt, none that is banned."""
        ids = seen.top_ids[-self.num_tokens :, 0]
        if self.banned and np.isin(ids, self.banned).any():
            return self.likeliest(seen.all_logits[-self.num_tokens :])
        return tuple(ids.tolist())

    def __str__(self) -> str:
        source = f"source of {len(self.source)} tokens, " if self.source else ""
        return f"{source}prompt of {len(self.prompt)}"


def random_case(
    rng: np.random.Generator,
    contract: GenerationContract,
    *,
    source_length: int,
    prompt_length: int,
    num_tokens: int,
    banned: Tokens = (),
) -> Case:
    """Return a case of random tokens, with a source if the model reads one: as long as it may be.

    The start token is the first of the prompt.
    """
    source: Tokens = ()
    if contract.cross_cache:
        length = min(source_length, contract.cross_cache.max_len)
        source = random_tokens(rng, contract.prompt_vocab_size, length)
    start = () if contract.decoder_start_token_id is None else (contract.decoder_start_token_id,)
    prompt = (*start, *random_tokens(rng, contract.vocab_size, prompt_length - len(start)))
    return Case(source, prompt, num_tokens, banned=banned)


def make_cases(
    contract: GenerationContract,
    samples: Sequence[Tokens],
    per_length: int,
    num_steps: int = MAX_STEPS,
    banned: Tokens = (),
) -> list[Case]:
    """Return `per_length` random cases of every length that is tried, and the samples.

    No `banned` token follows them. Of every second one the logits behind all of the prompt are
    wanted, as far as memory allows.
    """
    rng = np.random.default_rng(SEED)
    limit, start = contract.cache.max_len, contract.decoder_start_token_id
    most = max(1, _SCORED_LOGITS // contract.vocab_size)

    def case(source: Tokens, prompt: Tokens, i: int = 0) -> Case:
        num_tokens = min(num_steps, limit - len(prompt) + 1)
        return Case(source, prompt, num_tokens, min(len(prompt), most) if i % 2 else 1, banned)

    tokens = Deck(rng, contract.vocab_size)
    source_tokens = Deck(rng, contract.prompt_vocab_size)
    if contract.cross_cache is None or start is None:
        random = [
            case((), tokens.deal(length), i)
            for length in spread_lengths(limit)
            for i in range(per_length)
        ]
        return random + [case((), sample) for sample in samples]
    cases = [case(source, (start,)) for source in samples]
    given = cycle(spread_lengths(limit))
    for length in spread_lengths(contract.cross_cache.max_len):
        for i in range(per_length):
            # Every fourth target, and the last one, begins with given tokens, so that the decoder
            # has a prompt too.
            has_prompt = i % 4 == 3 or i == per_length - 1
            forced = tokens.deal(next(given) - 1) if has_prompt else ()
            source = source_tokens.deal(length)
            cases.append(case(source, (start, *forced), i))
    return cases
