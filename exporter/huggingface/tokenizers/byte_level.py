"""Makes tokenizers of `vocab.json` and `merges.txt` (GPT-2, BART, Qwen), and of bytes (ByT5)."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.json_file import parse_object, read_bounded
from exporter.huggingface.tokenizers.added import add_tokens, put_around, surround
from exporter.huggingface.tokenizers.settings import Settings, Token

VOCABULARY_NAME = "vocab.json"
MERGES_NAME = "merges.txt"
_MAX_BYTES = 2**26
_NUM_EXTRA = 125  # sentinels of ByT5
# What a Qwen cuts a text into before it merges bytes: digits stand alone.
_WORDS_OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of a `vocab.json`, by token."""
    try:
        content = parse_object(read_bounded(path, _MAX_BYTES))
        return TypeAdapter(dict[str, int]).validate_python(content, strict=True)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def read_gpt2(directory: Path, settings: Settings, room: int) -> Tokenizer:
    """Return the tokenizer of a GPT-2 or OPT."""
    tokenizer = _read_bpe(directory, add_prefix_space=bool(settings.add_prefix_space))
    begin = settings.text_of("bos_token", "<|endoftext|>")
    names = (begin, settings.text_of("eos_token", begin), settings.text_of("unk_token", begin))
    add_tokens(tokenizer, [Token(content=name) for name in dict.fromkeys(names)], settings)
    if settings.add_bos_token:
        put_around(tokenizer, [begin], [])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def read_roberta(directory: Path, settings: Settings, room: int) -> Tokenizer:
    """Return the tokenizer of a RoBERTa or BART: a text stands between `<s>` and `</s>`."""
    tokenizer = _read_bpe(directory, add_prefix_space=bool(settings.add_prefix_space))
    begin, end = settings.text_of("cls_token", "<s>"), settings.text_of("sep_token", "</s>")
    known = [Token(content=name) for name in (begin, "<pad>", end, "<unk>")]
    mask = Token(content=settings.text_of("mask_token", "<mask>"), lstrip=True)
    add_tokens(tokenizer, [*known, mask], settings)
    surround(tokenizer, "RobertaTokenizer", settings)
    return tokenizer


def read_qwen2(directory: Path, settings: Settings, room: int) -> Tokenizer:
    """Return the tokenizer of a Qwen 2 or 3, which composes characters first."""
    tokenizer = _read_bpe(directory, add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(_WORDS_OF_QWEN), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(settings.add_prefix_space), use_regex=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, in_bytes])
    end = "<|endoftext|>"
    names = [settings.text_of(f"{name}_token", end) for name in ("unk", "eos", "pad")]
    add_tokens(tokenizer, [Token(content=name) for name in dict.fromkeys(names)], settings)
    return tokenizer


def read_bytes(directory: Path, settings: Settings, room: int) -> Tokenizer:
    """Return the tokenizer of a ByT5: a byte's id is three more; a text ends with `</s>`."""
    names = ("<pad>", "</s>", "<unk>")
    ids = {name: i for i, name in enumerate(names)}
    ids |= {char: byte + len(names) for byte, char in enumerate(_chars_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_extra = _NUM_EXTRA if settings.extra_ids is None else settings.extra_ids
    extra = [f"<extra_id_{i}>" for i in range(min(num_extra, room - len(ids)))]
    known = [Token(content=name, lstrip=True, rstrip=True) for name in names]
    add_tokens(tokenizer, [*known, *(Token(content=name) for name in extra)], settings)
    put_around(tokenizer, [], ["</s>"], pair=["$A", "</s>", "$B", "</s>"])
    return tokenizer


def _read_bpe(directory: Path, *, add_prefix_space: bool) -> Tokenizer:
    ids = read_vocabulary(directory / VOCABULARY_NAME)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_read_merges(directory / MERGES_NAME)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(path: Path) -> list[tuple[str, str]]:
    lines = read_bounded(path, _MAX_BYTES).decode().split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise ValueError(f"{path.name}, line {number}: not two pieces with a space between")
        merges.append((left, right))
    return merges


def _chars_of_bytes() -> list[str]:
    """Return the character that stands for each byte in the library's byte-level tokenizers."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
