"""How near what a package writes is to what a person wrote, and to what its eager model writes.

Both write the likeliest token each time, none that is banned; the package as it does when it
serves, step by step. The eager model, which has no cache, reads what the package would write and
says in one pass where it would write something else; from there on the package is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer
from torch import nn

from engine.package.manifest import GenerationContract
from exporter.certificate.comparison import exported_graphs
from exporter.certificate.driver import Asked, generate
from exporter.certificate.eager import eager_logits
from exporter.certificate.execution import load_for_cpu
from exporter.certificate.generation_cases import Case
from exporter.certificate.scored_text import MAX_LINES, Line
from exporter.likeness import likeness
from exporter.samples import Tokens

BATCH_SIZE = 8
_MIN_LINES = 8
_PARAMETERS = 5 * 10**9  # of a model, times the lines that it answers

Write = Callable[[Sequence[Case]], list[Tokens]]  # as many tokens as each case asks for


@dataclass(frozen=True)
class Answers:
    """chrF (Popović 2015), 0 to 100, of the answers to some lines."""

    num_lines: int
    exported: float | None  # of the package's answers to references; None: there are none
    eager: float | None  # of the eager model's
    between: float | None  # of the package's to the eager model's; None: that one writes nothing


def measure_answers(
    model: nn.Module,
    contract: GenerationContract,
    directory: Path,
    lines: Sequence[Line],
    tokenizer: Tokenizer,
) -> Answers:
    """Let both sides answer the first lines; a large model answers fewer."""
    lines = lines[: num_lines(sum(weight.numel() for weight in model.parameters()))]
    cases = [line.case for line in lines]
    with exported_graphs():
        runner = load_for_cpu(contract, directory, 0, BATCH_SIZE)

    def write(asked: Sequence[Case]) -> list[Tokens]:
        found = zip(asked, generate(runner, asked, Asked()), strict=True)
        return [case.chosen(seen) for case, seen in found]

    ends = contract.eos_token_ids
    written = [tokens for batch in _batches(cases) for tokens in write(batch)]
    ours = _texts(tokenizer, [until_end(tokens, ends) for tokens in written])
    theirs = _texts(tokenizer, eager_answers(model, cases, ends, write))
    references = [line.reference for line in lines if line.reference is not None]
    return Answers(
        num_lines=len(lines),
        exported=likeness(ours, references).chrf if references else None,
        eager=likeness(theirs, references).chrf if references else None,
        between=likeness(ours, theirs).chrf if any(theirs) else None,
    )


def num_lines(num_parameters: int) -> int:
    """Return how many lines a model answers at most."""
    return min(MAX_LINES, max(_MIN_LINES, _PARAMETERS // num_parameters))


def eager_answers(
    model: nn.Module, cases: Sequence[Case], ends: Collection[int], guess: Write
) -> list[Tokens]:
    """Return what the eager model writes for sources, up to the token that ends it.

    `guess` writes tokens for at most BATCH_SIZE cases; the nearer they are, the sooner it is done.
    """
    return [answer for batch in _batches(cases) for answer in _write(model, batch, ends, guess)]


def until_end(tokens: Tokens, ends: Collection[int]) -> Tokens:
    """Return the tokens up to the first that ends an answer, with it."""
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


def _write(
    model: nn.Module, cases: Sequence[Case], ends: Collection[int], guess: Write
) -> list[Tokens]:
    written: dict[int, Tokens] = {i: () for i in range(len(cases))}
    members = list(written)
    while members:
        asked = [_behind(cases[i], written[i]) for i in members]
        guessed = guess(asked)
        found = eager_logits(model, asked, guessed)
        for i, tokens, logits in zip(members, guessed, found, strict=True):
            agreed = _agreed(tokens, cases[i].likeliest(logits))
            written[i] = until_end((*written[i], *agreed), ends)
        members = [i for i in members if _is_open(cases[i], written[i], ends)]
    return list(written.values())


def _behind(case: Case, written: Tokens) -> Case:
    """Return the case that is left when some of its tokens are written."""
    left = case.num_tokens - len(written)
    return replace(case, prompt=(*case.prompt, *written), num_tokens=left)


def _agreed(guessed: Tokens, likeliest: Tokens) -> Tokens:
    """Return the guessed tokens that are the likeliest, and the likeliest where one is not."""
    pairs = zip(guessed, likeliest, strict=True)
    equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(guessed))
    return likeliest[: equal + 1]


def _is_open(case: Case, written: Tokens, ends: Collection[int]) -> bool:
    return len(written) < case.num_tokens and written[-1] not in ends


def _batches(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[first : first + BATCH_SIZE] for first in range(0, len(cases), BATCH_SIZE)]


def _texts(tokenizer: Tokenizer, answers: Sequence[Tokens]) -> list[str]:
    texts: list[str] = tokenizer.decode_batch([list(ids) for ids in answers])
    return texts
