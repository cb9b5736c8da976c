"""The cases of a model that generates: prompts, with or without a source, and what follows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

import numpy as np

from engine.package.manifest import GenerationContract, Proof
from engine.sampling.logits import StepLogits
from exporter.prover.cases import LEVELS, affordable_steps, first_lengths, spread_lengths
from exporter.samples import SEED, Tokens, TokenSampler, random_tokens

_FIRST_PER_LENGTH = 2
_LONG = 256  # tokens; a quick proof tries the longest text once if it is longer
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

    @property
    def first_logit(self) -> int:
        """The first position whose logits are wanted."""
        return len(self.prompt) - self.num_prompt_logits

    @property
    def length(self) -> int:
        """How many tokens its source has, or else its prompt."""
        return len(self.source) or len(self.prompt)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many tokens its source has, and its prompt with what follows it."""
        return len(self.source), len(self.prompt) + self.num_tokens

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

    def likeliest(self, logits: np.ndarray) -> Tokens:
        """Return the likeliest tokens by logits [N, vocab_size], none that is banned."""
        if self.banned:
            logits = logits.copy()
            logits[:, self.banned] = -np.inf
        return tuple(logits.argmax(axis=-1).tolist())

    def chosen(self, seen: StepLogits) -> Tokens:
        """Return the likeliest tokens that followed the prompt, none that is banned."""
        ids = seen.top_ids[-self.num_tokens :, 0]
        if self.banned and np.isin(ids, self.banned).any():
            return self.likeliest(seen.all_logits[-self.num_tokens :])
        return tuple(ids.tolist())

    def __str__(self) -> str:
        source = f"source of {len(self.source)} tokens, " if self.source else ""
        return f"{source}prompt of {len(self.prompt)}"


def case_of(
    contract: GenerationContract,
    text: Tokens,
    num_tokens: int,
    prefix: Tokens = (),
    banned: Tokens = (),
) -> Case:
    """Return the case of a prompt, or of a source whose target begins with a prefix.

    Tokens without room in the model are left out.
    """
    start, most = contract.decoder_start_token_id, contract.cache.max_len
    source, prompt = ((), text) if start is None else (text, (start, *prefix))
    prompt = prompt[:most]
    return Case(source, prompt, min(num_tokens, most - len(prompt) + 1), banned=banned)


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


class Cases(NamedTuple):
    """The cases that are tried of a model, shuffled."""

    first: list[Case]  # lengths at which most faults show
    rest: list[Case]
    per_length: int

    @property
    def all(self) -> list[Case]:
        """All cases."""
        return self.first + self.rest


def affordable_cases(
    contract: GenerationContract,
    num_parameters: int,
    samples: Sequence[Tokens] = (),
    proof: Proof = "standard",
    banned: Tokens = (),
) -> Cases:
    """Return as many cases as a model of so many parameters is tried with.

    `samples` are prompts or sources besides the random ones; no `banned` token follows any.
    """
    level = LEVELS[proof]

    def cases(per_length: int, num_steps: int = 1) -> list[Case]:
        return make_cases(contract, samples, per_length, num_steps, proof, banned)

    per_length = level.per_length
    while per_length > 1:
        num_tokens = sum(len(case.source) + len(case.prompt) for case in cases(per_length))
        if num_parameters * num_tokens <= level.arithmetic:
            break
        per_length //= 2
    steps = affordable_steps(level, num_parameters, len(cases(per_length)))
    found = cases(per_length, steps)
    if proof == "full":
        tried = {case.length for case in found}
        lengths = [i for i in range(1, contract.max_prompt_len + 1) if i not in tried]
        found += _random_cases(contract, dict.fromkeys(lengths, 1), steps, banned)
    np.random.default_rng(SEED).shuffle(found)
    early, counted = first_lengths(contract.max_prompt_len), Counter[int]()
    first: list[Case] = []
    rest: list[Case] = []
    for case in found:
        counted[case.length] += 1
        comes_first = case.length in early and counted[case.length] <= _FIRST_PER_LENGTH
        (first if comes_first else rest).append(case)
    return Cases(first, rest, per_length)


def first_of_each_length(cases: Sequence[Case]) -> list[Case]:
    """Return the first case with a prompt of each length."""
    return list({len(case.prompt): case for case in reversed(cases)}.values())


def make_cases(
    contract: GenerationContract,
    samples: Sequence[Tokens],
    per_length: int,
    num_steps: int,
    proof: Proof = "standard",
    banned: Tokens = (),
) -> list[Case]:
    """Return `per_length` random cases of every length that is tried, and the samples."""
    lengths = dict.fromkeys(spread_lengths(contract.max_prompt_len, proof), per_length)
    if proof == "quick" and contract.max_prompt_len > _LONG:
        lengths[contract.max_prompt_len] = 1
    given = [case_of(contract, sample, num_steps, banned=banned) for sample in samples]
    return given + _random_cases(contract, lengths, num_steps, banned)


def _random_cases(
    contract: GenerationContract,
    lengths: Mapping[int, int],
    num_steps: int,
    banned: Tokens,
) -> list[Case]:
    """Return cases of random tokens, so many of each length.

    Every second one wants the logits behind all of its prompt, as far as memory allows.
    """
    rng = np.random.default_rng(SEED)
    sampler = TokenSampler(rng, contract.prompt_vocab_size)
    targets, prefixes = (
        TokenSampler(rng, contract.vocab_size),
        cycle(spread_lengths(contract.cache.max_len)),
    )
    most = max(1, _SCORED_LOGITS // contract.vocab_size)
    cases = []
    for length, per_length in lengths.items():
        for i in range(per_length):
            text = sampler.sample(length)
            prefix: Tokens = ()
            # Every fourth target, and the last one, begins with given tokens, so that the decoder
            # has a prompt, too.
            if contract.cross_cache and (i % 4 == 3 or i == per_length - 1):
                prefix = targets.sample(next(prefixes) - 1)
            case = case_of(contract, text, num_steps, prefix, banned)
            wanted = min(len(case.prompt), most) if i % 2 else 1
            cases.append(replace(case, num_prompt_logits=wanted))
    return cases
