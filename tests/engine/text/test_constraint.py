"""Constraints: whatever a model's logits, the text that is drawn under one matches it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.errors import CapabilityNotSupported, InvalidRequest
from engine.requests.request import Constraint, SamplingParams
from engine.sampling.draws import Draw
from engine.sampling.sampler import Sampler
from engine.sampling.top_k import step_logits
from engine.text.constraint import ConstraintCompiler, ConstraintMatcher
from engine.text.tokenizer import Tokenizer
from exporter.tasks.own.subwords import train_subwords

EOS = 257
VOCAB = 258
COMPACT = {"x-guidance": {"whitespace_flexible": False}}

REGEXES = [
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    r"(yes|no|maybe){1,3}",
    r"[a-f]*(x|yz)",
    r"(ä|ö|€|日本){2,5}",
    r"[^!\n]{0,8}!?",
    r"(\[(\d(,\d){0,9})?\]|null)",
]
SCHEMAS: list[dict] = [
    {"type": "integer", "minimum": 3, "maximum": 27},
    {"enum": ["a", 1, None, {"b": [True]}]},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
]


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(byte_tokenizer, VOCAB, (EOS,))


def generate(
    matcher: ConstraintMatcher, seed: int, *, vocab: int = VOCAB, eos: int = EOS, limit: int = 500
) -> list[int]:
    """Draw tokens from random logits until the end of the sequence."""
    rng, tokens = np.random.default_rng(seed), []
    params = SamplingParams("sampling", constraint=Constraint("regex", ("made elsewhere",)))
    for position in range(limit):
        logits = step_logits(rng.normal(0, 2, (1, vocab)).astype(np.float32), 1)
        draw = Draw(0, params, seed, 0, position, (), tokens, 0, matcher)
        sampled = Sampler().sample(logits, [draw])[0]
        matcher.advance(sampled.token_id)
        if sampled.token_id == eos:
            return tokens
        tokens.append(sampled.token_id)
    raise AssertionError(f"no end after {limit} tokens: {tokens}")


def allowed_after(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> set[int]:
    matcher = compiler.compile(constraint).fork()
    for token_id in text.encode():
        matcher.advance(token_id)
    return set(matcher.allowed().nonzero()[0].tolist())


@pytest.mark.parametrize("regex", REGEXES)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_every_text_matches_the_regex(
    compiler: ConstraintCompiler, byte_tokenizer: Tokenizer, regex: str, seed: int
) -> None:
    matcher = compiler.compile(Constraint("regex", (regex,))).fork()

    text = byte_tokenizer.decode(generate(matcher, seed))

    assert re.fullmatch(regex, text)


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_every_text_validates_against_the_schema(
    compiler: ConstraintCompiler, byte_tokenizer: Tokenizer, schema: dict, seed: int
) -> None:
    constraint = Constraint("json_schema", (json.dumps(COMPACT | schema),))

    text = byte_tokenizer.decode(generate(compiler.compile(constraint).fork(), seed))

    jsonschema.validate(json.loads(text), schema)


def test_between_things_of_json_is_one_blank_or_line_end_at_most(
    compiler: ConstraintCompiler,
) -> None:
    schema = Constraint("json_schema", ('{"type": "array", "items": {"type": "integer"}}',))

    for text in ("[", "[1,", "[1"):
        assert allowed_after(compiler, schema, text) & {*b" \t\r\n"} == {*b" \n"}
        for space in " \n":
            assert not allowed_after(compiler, schema, text + space) & {*b" \t\r\n"}


@settings(max_examples=25)
@given(
    choices=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
    seed=st.integers(0, 2**32),
)
def test_every_text_is_one_of_the_choices(
    compiler: ConstraintCompiler, byte_tokenizer: Tokenizer, choices: list[str], seed: int
) -> None:
    matcher = compiler.compile(Constraint("choice", tuple(choices))).fork()

    text = byte_tokenizer.decode(generate(matcher, seed))

    assert text in choices


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_every_text_is_of_the_grammar(
    compiler: ConstraintCompiler, byte_tokenizer: Tokenizer, seed: int
) -> None:
    grammar = 'start: sum\nsum: product ("+" product)~0..2\nproduct: NUM ("*" NUM)?\nNUM: /[1-9]/'

    matcher = compiler.compile(Constraint("grammar", (grammar,))).fork()
    text = byte_tokenizer.decode(generate(matcher, seed))

    assert re.fullmatch(r"[1-9](\*[1-9])?(\+[1-9](\*[1-9])?){0,2}", text)


def test_the_sequence_may_end_where_the_text_may_and_must_where_nothing_can_follow(
    compiler: ConstraintCompiler,
) -> None:
    constraint = Constraint("regex", ("ab?",))

    assert allowed_after(compiler, constraint, "") == {ord("a")}
    assert allowed_after(compiler, constraint, "a") == {ord("b"), EOS}
    assert allowed_after(compiler, constraint, "ab") == {EOS}


def test_after_its_end_a_sequence_can_only_end_again(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint("regex", ("a",))).fork()

    for token_id in (ord("a"), EOS, EOS):
        matcher.advance(token_id)

    assert matcher.error is None
    assert matcher.allowed().nonzero()[0].tolist() == [EOS]


def test_a_fork_goes_its_own_way(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint("choice", ("ax", "by"))).fork()
    other = matcher.fork()

    matcher.advance(ord("a"))
    other.advance(ord("b"))

    assert matcher.allowed().nonzero()[0].tolist() == [ord("x")]
    assert other.allowed().nonzero()[0].tolist() == [ord("y")]


def test_ids_that_the_tokenizer_does_not_make_are_never_allowed(byte_tokenizer: Tokenizer) -> None:
    compiler = ConstraintCompiler(byte_tokenizer, VOCAB + 6, (EOS,))

    allowed = compiler.compile(Constraint("regex", ("(?s:.*)",))).fork().allowed()

    assert allowed.shape == (VOCAB + 6,)
    assert not allowed[VOCAB:].any()
    assert allowed[EOS] and not allowed[EOS - 1]  # the other special token


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "a(b", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", '"text"', "object or boolean"),
        ("json_schema", "[" * 60_000, "no JSON"),
        ("json_schema", '{"type": "frob"}', "frob"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "Resource"),
        ("json_schema", "false", "Unsatisfiable"),
        ("grammar", 'start: "yes" x', "unknown name"),
        ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
        ("regex", "a" * 65_537, "65,537 characters are more than 65,536"),
    ],
)
def test_a_wrong_constraint_is_refused_at_its_path(
    compiler: ConstraintCompiler, kind: str, text: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as caught:
        compiler.compile(Constraint(kind, (text,)))

    assert [v.field for v in caught.value.violations] == [f"decoding.constraint.{kind}"]
    assert len(str(caught.value)) < 1000
    assert "%json" not in str(caught.value)  # a grammar is made of the schema


@pytest.mark.parametrize(
    "rules",
    [
        [f"r{i}: r{i + 1}" for i in range(4000)] + ['r4000: "a"'],
        [f'r{i}: "b" r{i + 1}' for i in range(3000)] + ['r3000: "a"'],
    ],
)
def test_rules_that_nest_thousandfold_do_not_overflow_the_stack(
    compiler: ConstraintCompiler, rules: list[str]
) -> None:
    constraint = Constraint("grammar", ("\n".join(["start: r0", *rules]),))

    assert compiler.compile(constraint).allowed().any()


def test_a_constraint_that_grows_beyond_its_bounds_allows_nothing_and_says_why(
    compiler: ConstraintCompiler,
) -> None:
    rules = [f'r{i}: r{i + 1} | "b" r{i + 1}' for i in range(2500)]
    grammar = "\n".join(["start: r0", *rules, 'r2500: "a"'])
    matcher = compiler.compile(Constraint("grammar", (grammar,))).fork()

    matcher.advance(ord("b"))

    assert not matcher.allowed().any()
    assert matcher.error is not None and "max is 5000" in matcher.error
    assert matcher.error.startswith("too complex to follow: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("red </s>", "can go on with the text: </s> is no text, but a special token"),
        ("red <", "can go on with the text"),
        ("</s>", "can go on with the text: </s> is no text, but a special token"),
    ],
)
def test_special_tokens_that_a_constraint_names_are_told(
    text: str, reason: str, tmp_path: Path
) -> None:
    tokenizer = unigram(tmp_path)
    size = tokenizer.vocab_size
    compiler = ConstraintCompiler(tokenizer, size, (size - 1,))
    matcher = compiler.compile(Constraint("choice", (text,))).fork()

    while (allowed := matcher.allowed()).any():
        matcher.advance(int(allowed.argmax()))

    assert matcher.error is not None and matcher.error.endswith(reason)


def test_what_was_compiled_is_kept_for_the_next_request(byte_tokenizer: Tokenizer) -> None:
    compiler = ConstraintCompiler(byte_tokenizer, VOCAB, (EOS,))
    constraint = Constraint("regex", ("a+",))

    first = compiler.compile(constraint)
    again = compiler.compile(Constraint("regex", ("a+",)))
    for i in range(100):
        compiler.compile(Constraint("choice", (str(i),)))

    assert again is first
    assert compiler.compile(constraint) is not first


def test_a_model_without_end_of_sequence_follows_no_constraint(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(CapabilityNotSupported, match="end-of-sequence"):
        ConstraintCompiler(byte_tokenizer, VOCAB, ()).compile(Constraint("regex", ("a",)))


def make_tokenizer(directory: Path, model: object, **parts: object) -> Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(["</s>"])
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory / "tokenizer.json")


def word_level(directory: Path) -> Tokenizer:
    words = {word: i for i, word in enumerate(["[UNK]", "red", "green", "blue", "12", "."])}
    return make_tokenizer(
        directory,
        models.WordLevel(words, unk_token="[UNK]"),
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )


def unigram(directory: Path) -> Tokenizer:
    pieces = ["▁", "▁red", "▁green", "▁blue", "gre", "en", "▁b", "lue", "▁12", *"bdegnlru12"]
    return make_tokenizer(
        directory,
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )


def byte_fallback(directory: Path) -> Tokenizer:
    pieces = ["▁", "▁red", "▁green", "blue", "12", "é", *(f"<0x{i:02X}>" for i in range(256))]
    return make_tokenizer(
        directory,
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True),
        decoder=decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


def character(directory: Path) -> Tokenizer:
    chars = {char: i for i, char in enumerate("abcdeglnru12 ")}
    return make_tokenizer(directory, models.BPE(chars, []), decoder=decoders.Fuse())


def byte_words(directory: Path) -> Tokenizer:
    made = train_subwords(["red blue 12", "green"], 300, [])
    made.add_special_tokens(["</s>"])
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory / "tokenizer.json")


@pytest.mark.parametrize("make", [word_level, unigram, byte_fallback, character, byte_words])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(red|green) (blue|12)"),
        ("choice", "green blue"),
        ("json_schema", '{"const": 12}'),
    ],
)
def test_texts_match_whatever_the_kind_of_tokenizer(
    tmp_path: Path, make, kind: str, value: str
) -> None:
    tokenizer = make(tmp_path)
    vocab, eos = tokenizer.vocab_size, tokenizer.vocab_size - 1
    compiler = ConstraintCompiler(tokenizer, vocab, (eos,))

    matcher = compiler.compile(Constraint(kind, (value,)))
    texts = {
        tokenizer.decode(generate(matcher.fork(), seed, vocab=vocab, eos=eos)) for seed in range(12)
    }

    expected = {"regex": value, "choice": value, "json_schema": "12"}[kind]
    assert all(re.fullmatch(expected, text) for text in texts)


def test_a_choice_is_written_in_letters_whose_bytes_are_tokens_each(tmp_path: Path) -> None:
    tokenizer = byte_words(tmp_path)
    vocab, eos = tokenizer.vocab_size, tokenizer.vocab_size - 1
    compiler = ConstraintCompiler(tokenizer, vocab, (eos,))

    matcher = compiler.compile(Constraint("choice", ("你好", "привет")))
    ids = generate(matcher.fork(), 0, vocab=vocab, eos=eos)

    assert tokenizer.decode(ids) in ("你好", "привет")


def test_a_tokenizer_whose_texts_do_not_add_up_is_refused(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "play": 1, "##ing": 2, "!": 3}
    tokenizer = make_tokenizer(
        tmp_path, models.WordPiece(words, unk_token="[UNK]"), decoder=decoders.WordPiece()
    )
    compiler = ConstraintCompiler(tokenizer, 5, (4,))

    with pytest.raises(CapabilityNotSupported, match="tokenizer of this model cannot follow"):
        compiler.compile(Constraint("regex", ("play",)))


@pytest.mark.parametrize(
    "grammar",
    ['start: colour\ncolour: "red" | "green" // } a comment', 'start: %json {"const": 12}'],
)
def test_a_grammar_is_followed_by_a_tokenizer_whose_texts_begin_with_a_hidden_space(
    grammar: str, tmp_path: Path
) -> None:
    tokenizer = unigram(tmp_path)
    vocab, eos = tokenizer.vocab_size, tokenizer.vocab_size - 1
    compiler = ConstraintCompiler(tokenizer, vocab, (eos,))

    matcher = compiler.compile(Constraint("grammar", (grammar,)))
    texts = {
        tokenizer.decode(generate(matcher.fork(), seed, vocab=vocab, eos=eos)) for seed in range(12)
    }

    assert texts <= {"red", "green", "12"}
