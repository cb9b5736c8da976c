"""Compiles constraints on the output's text, and says which tokens may come next."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from numpy.typing import NDArray

from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.requests.request import Constraint
from engine.text.grammar_vocabulary import read_vocabulary
from engine.text.lark import json_rule, literal
from engine.text.tokenizer import Tokenizer
from engine.wording import listed

_MAX_CACHED = 16  # compiled constraints; the least recently used goes first
_MAX_MESSAGE_CHARS = 500
_STUCK = "NoExtensionBias"  # how a message of llguidance begins where no token can follow

_MAX_CHARS = 65_536  # all texts of a constraint together
_STACK_BYTES = 256 * 2**20  # reserved, not used: rules that nest deeply are followed recursively

# The units are llguidance's, the same on every machine; the times are those on one core.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # to compile: 20 ms
    max_grammar_size=100_000,  # symbols
    step_lexer_fuel=100_000,  # for one mask: 7 ms
    step_max_items=50_000,  # for one mask: 3 ms
    max_items_in_row=5_000,
    max_lexer_states=10_000,  # 2 kB each: 20 MB
    verbose_errors=False,
)


class ConstraintMatcher:
    """Follows one sequence through a constraint.

    Once the text can only end, or the constraint has become too complex to follow, no token but an
    end-of-sequence or none at all is allowed.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_ids: Sequence[int],
        vocab_size: int,
        special: Sequence[str] = (),  # tokens that its text names
    ) -> None:
        self._matcher = matcher
        self._special = special
        self._eos_ids = list(eos_ids)
        self._vocab_size = vocab_size

    @property
    def error(self) -> str | None:
        """Why it cannot be followed any further; None if it can."""
        if not self._matcher.is_error():
            return None
        message = self._matcher.get_error()
        if not message.startswith(_STUCK):
            return f"too complex to follow: {_without_insides(message)}"
        named = (
            f": {listed(self._special)} is no text, but a special token" if self._special else ""
        )
        return f"no token of this model can go on with the text{named}"

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocab_size]; an end only if the text is whole."""
        allowed = np.zeros(self._vocab_size, np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
            allowed[:] = found.view(np.bool_)
        if self._matcher.is_error():
            allowed[:] = False
        else:
            allowed[self._eos_ids] = self._matcher.is_accepting() or self._matcher.is_stopped()
        return allowed

    def advance(self, token_id: int) -> None:
        """Take in a token that was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def fork(self) -> ConstraintMatcher:
        """Return a copy that goes its own way."""
        copy = self._matcher.deep_copy()
        return ConstraintMatcher(copy, self._eos_ids, self._vocab_size, self._special)


class ConstraintCompiler:
    """Makes matchers for the vocabulary of one model; any thread may ask.

    Compiling is bounded in time and memory, and what was compiled is kept for the next request.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._vocabulary: LLTokenizer | None = None  # built for the first constraint
        self._drops_first_space = False
        self._compiled: OrderedDict[Constraint, ConstraintMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint, given_ids: Sequence[int] = ()) -> ConstraintMatcher:
        """Return a matcher behind the given beginning of the text, to be forked for each sequence.

        Raises InvalidRequest for a constraint that is wrong or too large, or that no text matches
        which begins so; CapabilityNotSupported if the model's tokenizer cannot follow any.
        """
        matcher = self._compiled_or_kept(constraint)
        if not given_ids:
            return matcher
        matcher = matcher.fork()
        for n, token_id in enumerate(given_ids):
            if self._tokenizer.visible_token(token_id) is None:  # a language, say
                continue
            if not matcher.allowed()[token_id]:
                where = f"token {n} of what the output begins with ({token_id})"
                why = f"{where} does not go on with a text"
                raise _invalid(constraint, f"{why} that matches; leave one of the two out")
            matcher.advance(token_id)
        return matcher

    def _compiled_or_kept(self, constraint: Constraint) -> ConstraintMatcher:
        num_chars = sum(map(len, constraint.values))
        if num_chars > _MAX_CHARS:
            raise _invalid(constraint, f"{num_chars:,} characters are more than {_MAX_CHARS:,}")
        with self._lock:
            matcher = self._compiled.get(constraint)
            if matcher is None:
                matcher = _with_deep_stack(lambda: self._compile(constraint))
                self._compiled[constraint] = matcher
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(constraint)
        return matcher

    def _compile(self, constraint: Constraint) -> ConstraintMatcher:
        vocabulary = self._vocabulary = self._vocabulary or self._map_vocabulary()
        grammar = _grammar(constraint, "/ /" if self._drops_first_space else "")
        compiled = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise _invalid(constraint, compiled.get_error())
        special = [
            name
            for name in self._tokenizer.special_tokens
            if any(name in v for v in constraint.values)
        ]
        matcher = ConstraintMatcher(compiled, self._eos_ids, self._vocab_size, special)
        is_possible = matcher.allowed().any()  # builds its automaton as far as it is needed now
        if not is_possible:
            raise _invalid(constraint, matcher.error or "no text matches it")
        return matcher

    def _map_vocabulary(self) -> LLTokenizer:
        if not self._eos_ids:
            raise CapabilityNotSupported(
                "this model has no end-of-sequence token, which would end a constrained output; "
                "leave the constraint out",
                ("decoding.constraint",),
            )
        found = read_vocabulary(self._tokenizer, self._vocab_size)
        self._drops_first_space = found.drops_first_space
        vocabulary = _Vocabulary(found.tokens, self._eos_ids[0])
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(self._eos_ids))


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None
    special_token_ids = ()  # their bytes are empty, so that no grammar allows them

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize a text: asked for forced ones only."""
        return []


def _grammar(constraint: Constraint, prefix: str) -> str:
    """Return the constraint in llguidance's dialect of Lark, with `prefix` before the text.

    No text is forced on the model in tokens of the tokenizer's choice: a normalizer may change it.
    """
    text = constraint.values[0]
    match constraint.kind:
        case "regex":
            rules = f"start: {prefix} /{regex_to_lark(text, 'd')}/"
        case "json_schema":
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _invalid(constraint, f"no JSON that can be read: {error}") from error
            rules = f"start: {prefix} {json_rule(schema)}"
        case "choice":
            strings = map(literal, constraint.values)
            rules = f"start: {prefix} CHOICE\nCHOICE: {' | '.join(strings)}"
        case "grammar" if prefix:
            rules = f"start: {prefix} text\ntext: %lark {{\n{text}\n}}"
        case "grammar":
            rules = text
    return LLMatcher.grammar_from_lark(f'{rules}\n%llguidance {{"no_forcing": true}}')


def _with_deep_stack(function: Callable[[], ConstraintMatcher]) -> ConstraintMatcher:
    """Call a function in a thread whose stack holds the deepest recursion that _MAX_CHARS allow.

    An overflow would end the process.
    """
    result: Future[ConstraintMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="constraint", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return result.result()


def _invalid(constraint: Constraint, why: str) -> InvalidRequest:
    path = f"decoding.constraint.{constraint.kind}"
    return InvalidRequest([FieldViolation(path, _without_insides(why))])


def _without_insides(message: str) -> str:
    """Return a message of llguidance without the parser's insides."""
    for mark in ("<non-verbose/>", "<state>", "<backtrace>"):
        message = message.split(mark)[0]
    _, mark, fault = message.partition("failed to compile JSON schema")
    if mark:
        message = mark + fault.partition("\n")[0]  # the rest shows a grammar around the schema
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS]
