"""The lines that two models are compared on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.lines import read_lines as lines_of
from engine.package.manifest import GenerationContract
from engine.requests.generation_defaults import GenerationDefaults
from exporter.prover.generation_cases import Case, case_of
from exporter.samples import SEED, Tokens, random_tokens

MAX_BYTES = 2**26
_RANDOM_LINES = 16
_RANDOM_LEN = 12


@dataclass(frozen=True)
class Line:
    """A prompt or a source, and what should follow."""

    number: int  # in its file, from 1
    case: Case
    reference: str | None  # a person's text
    following: Tokens = ()  # the tokens of what should follow; of a decoder, of the line itself


def read_lines(
    path: Path,
    contract: GenerationContract,
    tokenizer: Tokenizer,
    target: Tokenizer,
    new: int,
    defaults: GenerationDefaults,
) -> list[Line]:
    """Return the lines of a UTF-8 file, each a prompt or a source, and behind a tab a reference.

    After each of them `new` tokens may follow, none that `defaults` ban, of a source behind what
    they force. Empty lines are skipped. Raises ConfigError for a file without lines or not in
    UTF-8, and for a line that the model has no room for.
    """
    lines = []
    for number, row in rows_of(path):
        text, _, reference = row.partition("\t")
        ids = tuple(tokenizer.encode(text).ids)
        following = target.encode(reference).ids if reference else ()
        case = _case(ids, contract, new, f"{path}, line {number}", defaults)
        lines.append(Line(number, case, reference or None, tuple(following)))
    if not lines:
        raise ConfigError(f"{path} has no lines; give a prompt or a source in each")
    return lines


def rows_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file that begin with a text, and their numbers from 1.

    Raises ConfigError for a file that is not in UTF-8.
    """
    for number, row in enumerate(lines_of(path, MAX_BYTES), start=1):
        if row.partition("\t")[0].strip():
            yield number, row


def random_lines(
    contract: GenerationContract, new: int, defaults: GenerationDefaults
) -> list[Line]:
    """Return prompts or sources of random tokens, always the same."""
    rng = np.random.default_rng(SEED)
    longest = contract.cross_cache.max_len if contract.cross_cache else contract.cache.max_len - 1
    length = min(_RANDOM_LEN, longest)
    drawn = (random_tokens(rng, contract.prompt_vocab_size, length) for _ in range(_RANDOM_LINES))
    return [
        Line(number, _case(ids, contract, new, f"prompt {number}", defaults), None)
        for number, ids in enumerate(drawn, start=1)
    ]


def _case(
    ids: Tokens, contract: GenerationContract, new: int, where: str, defaults: GenerationDefaults
) -> Case:
    """Return a case; ConfigError if the model has no room for it and one token more."""
    limit = contract.max_prompt_len
    if not 0 < len(ids) <= limit:
        raise ConfigError(
            f"{where} has {len(ids)} tokens; the models take 1 to {limit}, shorten or remove it"
        )
    return case_of(contract, ids, new, defaults.forced_begin, defaults.banned_tokens)


def with_reference(line: Line, contract: GenerationContract) -> tuple[Case, Tokens] | None:
    """Return what a model's perplexity is measured by: a case, and the tokens that follow.

    That is the reference of a source, and of a decoder the prompt with its reference. None: there
    are too few tokens.
    """
    if contract.cross_cache is not None:
        tokens = (*line.following, *contract.eos_token_ids[:1])[: contract.cache.max_len]
        case = Case(line.case.source, line.case.prompt[:1], len(tokens))
        return (case, tokens) if line.following else None
    ids = (*line.case.prompt, *line.following)[: contract.cache.max_len]
    return (Case((), ids[:1], len(ids) - 1), ids[1:]) if len(ids) > 1 else None
