"""Tokenizer and Detokenizer: streamed text is the whole text, cut where it should be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as tokenizer_trainers

from engine.errors import PackageError
from engine.text.tokenizer import Detokenizer, Tokenizer
from exporter.tasks.own.subwords import train_subwords

TEXTS = [
    "héllo wörld, the the other 日本語 日本 😀😀",
    "don't stop ''now''. a b c d",
    "\x00\t\n  x",
]
KINDS = (
    "byte_bpe",
    "byte",
    "byte_words",
    "char",
    "word_level",
    "word_piece",
    "metaspace",
    "byte_fallback",
    "word_ends",
)


def _byte_bpe() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizer_trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_tokens([AddedToken("日付"), AddedToken("é"), AddedToken("a b")])
    return made


def _byte() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def _byte_words() -> tokenizers.Tokenizer:
    return train_subwords(TEXTS * 3, 310, ["[EOS]"])


def _char() -> tokenizers.Tokenizer:
    chars = sorted(set("".join(TEXTS)))
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *chars])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made


def _word_level() -> tokenizers.Tokenizer:
    words = sorted({word for text in TEXTS for word in text.split()} | {"\ufffd", ".", ","})
    vocab = {token: i for i, token in enumerate(["<pad>", "<unk>", *words])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<pad>", "<unk>"])
    return made


def _word_piece() -> tokenizers.Tokenizer:
    pieces = ["do", "n't", "not", "'", "##n", "##t", "a", "##b", ".", ",", "'s", "I", "é", "##日"]
    vocab = {t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces])}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def _metaspace() -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "▁", "▁a", "b", "▁▁", "é", "日", ".", "▁."])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<unk>"])
    return made


def _byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["▁", "▁a", "b", "日", *(f"<0x{byte:02X}>" for byte in (0xE6, 0x97, 0xA5, 0x41, 0xFF))]
    made = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(["<unk>", *pieces])}, [], unk_token="<unk>")
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>"])
    return made


def _word_ends() -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "th", "e</w>", "a</w>"])}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return made


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    makers = (
        _byte_bpe,
        _byte,
        _byte_words,
        _char,
        _word_level,
        _word_piece,
        _metaspace,
        _byte_fallback,
        _word_ends,
    )
    found = {}
    for kind, make in zip(KINDS, makers, strict=True):
        path = folder / f"{kind}.json"
        make().save(str(path))
        found[kind] = Tokenizer(path)
    return found


@st.composite
def _cut_ids(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Draw places in a vocabulary of unknown size, and the sizes of the pushes."""
    places = draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=40))
    return places, draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))


def _stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    cuts: Sequence[int],
    stops: Sequence[str] = (),
    include_stop: bool = False,
    *,
    skip_special: bool = True,
) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, stops, include_stop, skip_special=skip_special)
    text, start, turn = "", 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)] if any(cuts) else 1
        piece = detokenizer.push(ids[start : start + size])
        text += piece.text
        if piece.stop is not None:
            return text, piece.stop
        start, turn = start + size, turn + 1
    rest = detokenizer.finish()
    return text + rest.text, rest.stop


def _cut_naively(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=_cut_ids(), skip=st.booleans())
def test_streamed_text_of_any_tokens_is_the_whole_text(
    kinds: dict[str, Tokenizer], kind: str, drawn: tuple[list[float], list[int]], skip: bool
) -> None:
    tokenizer = kinds[kind]
    ids = [int(place * tokenizer.vocab_size) for place in drawn[0]]

    text, stop = _stream(tokenizer, ids, drawn[1], skip_special=skip)

    assert (text, stop) == (tokenizer.decode(ids, skip_special=skip), None)


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_streamed_byte_level_text_is_the_text_that_was_encoded(
    kinds: dict[str, Tokenizer], text: str, cuts: list[int]
) -> None:
    for kind in ("byte_bpe", "byte", "byte_words"):
        ids = kinds[kind].encode(text)

        assert _stream(kinds[kind], ids, cuts)[0] == kinds[kind].decode(ids)
        if kind == "byte" and "<" not in text:
            assert kinds[kind].decode(ids) == text


@pytest.mark.parametrize("kind", ["byte_bpe", "byte", "word_piece"])
@given(drawn=_cut_ids(), data=st.data(), include=st.booleans())
def test_streamed_text_is_cut_at_the_stop_string_that_is_complete_first(
    kinds: dict[str, Tokenizer],
    kind: str,
    drawn: tuple[list[float], list[int]],
    data: st.DataObject,
    include: bool,
) -> None:
    tokenizer = kinds[kind]
    ids = [int(place * tokenizer.vocab_size) for place in drawn[0]]
    whole = tokenizer.decode(ids)
    part = st.builds(
        lambda a, b: whole[a : a + b],
        st.integers(0, max(len(whole) - 1, 0)),
        st.integers(1, 4),
    )
    stops = data.draw(
        st.lists(st.one_of(part, st.text(alphabet="ab\ufffd ", max_size=3)), max_size=4)
    )
    stops = [stop for stop in stops if stop]

    assert _stream(tokenizer, ids, drawn[1], stops, include) == _cut_naively(whole, stops, include)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_overlapping_stop_strings_match_as_a_naive_search_does(
    kinds: dict[str, Tokenizer], text: str, stops: list[str], include: bool
) -> None:
    ids = kinds["byte"].encode(text)

    assert _stream(kinds["byte"], ids, [1], stops, include) == _cut_naively(text, stops, include)


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=_cut_ids(), others=_cut_ids(), place=st.floats(0, 1))
@settings(max_examples=60)
def test_a_fork_goes_on_as_its_original_does_and_apart_from_it(
    kinds: dict[str, Tokenizer],
    kind: str,
    drawn: tuple[list[float], list[int]],
    others: tuple[list[float], list[int]],
    place: float,
) -> None:
    tokenizer = kinds[kind]
    ids, other_ids = ([int(x * tokenizer.vocab_size) for x in xs] for xs, _ in (drawn, others))
    num_before = int(place * len(ids))
    stops = ["the o", "\ufffdb", " .", "日"]
    original = Detokenizer(tokenizer, stops)
    original.push(ids[:num_before])

    fork = original.fork()
    original.push(other_ids)
    fork_pieces = [fork.push([token_id]) for token_id in ids[num_before:]]

    twin = Detokenizer(tokenizer, stops)
    twin.push(ids[:num_before])
    assert fork_pieces == [twin.push([token_id]) for token_id in ids[num_before:]]
    assert fork.finish() == twin.finish()


def test_text_is_sent_as_soon_as_it_cannot_become_a_stop_string(
    kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = kinds["byte"]
    detokenizer = Detokenizer(tokenizer, ["END", "N"])

    pieces = [detokenizer.push(tokenizer.encode(char)).text for char in "xEyEEx"]

    assert pieces == ["x", "", "Ey", "", "E", "Ex"]


def test_bytes_of_an_unfinished_character_wait_and_become_a_replacement_at_the_end(
    kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = kinds["byte"]
    ids = tokenizer.encode("a😀")
    detokenizer = Detokenizer(tokenizer, [], False)

    pieces = [detokenizer.push([token_id]).text for token_id in ids[:-1]]

    assert pieces == ["a", "", "", ""]
    assert detokenizer.finish().text == "\ufffd"


def test_invalid_bytes_are_not_held_back(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte"]
    continuation = tokenizer.encode("é")[1]
    detokenizer = Detokenizer(tokenizer)

    pieces = [detokenizer.push([continuation]).text for _ in range(3)]

    assert pieces == ["\ufffd"] * 3


def test_text_and_tokens_behind_a_stop_string_are_dropped(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["word_level"]
    detokenizer = Detokenizer(tokenizer, ["op"], include_stop=True)

    piece = detokenizer.push(tokenizer.encode("a stop now a"))

    assert (piece.text, piece.stop) == ("a stop"[:6], "op")
    assert detokenizer.push(tokenizer.encode("b")).text == ""
    assert detokenizer.finish().text == ""


def test_stop_string_completed_before_min_new_tokens_is_plain_text(
    kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = kinds["byte"]
    detokenizer = Detokenizer(tokenizer, ["ab"], min_new_tokens=5)

    piece = detokenizer.push(tokenizer.encode("ababxab"))

    assert (piece.text, piece.stop) == ("ababx", "ab")


@pytest.mark.parametrize(
    ("stops", "skip", "include", "expected"),
    [
        (["</s>"], True, False, ("ab", "</s>")),
        (["</s>\n"], True, False, ("ab", "</s>\n")),
        (["b</s>"], True, False, ("a", "b</s>")),
        (["b</s>\n"], True, True, ("ab</s>\n", "b</s>\n")),
        (["b</s>c", "d<s></s>e"], True, False, ("ab\nc", "d<s></s>e")),
        (["x</s>", "<s>e"], True, False, ("ab\ncde", None)),
        (["cd<"], True, False, ("ab\ncde", None)),
        (["cd<"], False, False, ("ab</s>\n", "cd<")),
        (["</s>"], False, True, ("ab</s>", "</s>")),
        ([], False, False, ("ab</s>\ncd<s></s>e", None)),
    ],
)
def test_a_stop_string_with_a_special_token_is_found_where_the_token_is(
    kinds: dict[str, Tokenizer],
    stops: list[str],
    skip: bool,
    include: bool,
    expected: tuple[str, str | None],
) -> None:
    tokenizer = kinds["byte"]
    ids = tokenizer.encode("ab</s>\ncd<s></s>e")

    for cuts in ([1], [3, 2], [40]):
        assert _stream(tokenizer, ids, cuts, stops, include, skip_special=skip) == expected


def test_a_stop_string_is_found_in_what_was_written_like_a_special_token(
    kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = kinds["byte"]
    ids = [token_id for char in "ab</s>c" for token_id in tokenizer.encode(char)]

    assert _stream(tokenizer, ids, [1], ["</s>"]) == ("ab", "</s>")


def test_time_per_token_does_not_grow_with_the_text(kinds: dict[str, Tokenizer]) -> None:
    def seconds(tokenizer: Tokenizer, ids: list[int]) -> float:
        detokenizer = Detokenizer(tokenizer, ["never" * 40])
        started = time.thread_time()  # processor time: other processes do not count
        for token_id in ids:
            detokenizer.push([token_id])
        return time.thread_time() - started

    for kind, text in (
        ("byte", "n\u00e9vern"),
        ("word_piece", "a don't"),
        ("byte_fallback", "b日"),
    ):
        few = kinds[kind].encode(text) * 40
        short = min(seconds(kinds[kind], few) for _ in range(5))

        assert seconds(kinds[kind], few * 20) < 20 * 10 * short


@pytest.mark.parametrize(
    ("kind", "token", "expected"),
    [
        ("byte_bpe", "Ġthe", b" the"),
        ("byte_bpe", "Ã", b"\xc3"),
        ("byte_bpe", "日付", "日付".encode()),
        ("byte_bpe", "<eos>", b"<eos>"),
        ("char", "é", "é".encode()),
        ("word_level", "the", b" the"),
        ("word_piece", "not", b" not"),
        ("word_piece", "##日", "日".encode()),
        ("word_piece", ".", b"."),
        ("word_piece", "[SEP]", b"[SEP]"),
        ("metaspace", "▁a", b" a"),
        ("metaspace", "▁", b" "),
        ("metaspace", "b", b"b"),
        ("byte_words", "æ", b"\xe6"),
        ("byte_words", "Ġa", b" a"),
        ("byte_fallback", "▁a", b" a"),
        ("byte_fallback", "<0xE6>", b"\xe6"),
        ("byte_fallback", "<0x41>", b"A"),
        ("byte_fallback", "日", "日".encode()),
        ("word_ends", "th", b"th"),
        ("word_ends", "e</w>", b"e "),
    ],
)
def test_bytes_of_a_token_are_what_it_adds_to_a_text(
    kinds: dict[str, Tokenizer], kind: str, token: str, expected: bytes
) -> None:
    tokenizer = kinds[kind]
    token_id = tokenizer._tokenizer.token_to_id(token)

    assert tokenizer.token_bytes(token_id) == expected
    assert tokenizer.token_bytes(token_id) == expected  # remembered


def test_an_id_without_a_token_has_no_bytes(kinds: dict[str, Tokenizer]) -> None:
    assert kinds["byte"].token_bytes(kinds["byte"].vocab_size) == b""


@pytest.mark.parametrize("kind", ["char", "word_level", "word_piece", "metaspace"])
@given(data=st.data())
def test_bytes_of_tokens_make_up_the_text_behind_the_first(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = kinds[kind]
    plain = [i for i in range(tokenizer.vocab_size) if tokenizer.visible_token(i) is not None]
    ids = data.draw(st.lists(st.sampled_from(plain), min_size=1, max_size=12))

    behind = b"".join(map(tokenizer.token_bytes, ids[1:])).decode()

    assert tokenizer.decode(ids[:1]) + behind == tokenizer.decode(ids)


def test_offsets_are_bytes_of_the_utf8_text(kinds: dict[str, Tokenizer]) -> None:
    text = "é a.日 I"

    found = kinds["word_piece"].encode_with_offsets(text)

    encoded = text.encode()
    parts = [encoded[start:end].decode() for start, end in found.offsets]
    assert parts == ["", "é", "a", ".", "日", "I", ""]
    assert [i for i, special in enumerate(found.special) if special] == [0, 6]
    assert found.ids == tuple(kinds["word_piece"].encode(text))
    assert set(found.token_types) == {0}


def test_offsets_of_a_pair_count_in_each_text_of_its_own(kinds: dict[str, Tokenizer]) -> None:
    found = kinds["word_piece"].encode_with_offsets("é é a", "é I")

    assert found.offsets == ((0, 0), (0, 2), (3, 5), (6, 7), (0, 0), (0, 2), (3, 4), (0, 0))
    assert found.token_types == (0, 0, 0, 0, 0, 1, 1, 1)


def test_encoding_is_never_cut_or_padded_whatever_the_file_says(tmp_path: Path) -> None:
    made = _char()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))

    assert len(Tokenizer(tmp_path / "tokenizer.json").encode("the the")) == 7


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"a": 1}', b"\xff\xfe", b"[]"])
def test_wrong_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(PackageError, match="tokenizer.json.*export the model again"):
        Tokenizer(path)
