"""Lines that tokenizers find difficult: many scripts, marks, joiners, controls, spaces, code."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

_WORDS = (
    "the quick brown fox jumps over a lazy dog Straße naïve café façade Ångström "
    "съешь же ещё этих мягких французских булок да выпей чаю "
    "ξεσκεπάζω την ψυχοφθόρα βδελυγμία האהבה היא שירה العربية لغة جميلة مُحَمَّدٌ שָׁלוֹם "
    "नमस्ते दुनिया ภาษาไทยยากมาก 我能吞下玻璃而不伤身体 日本語を勉強します ﾊﾝｶｸｶﾞｷﾞ 한국어를 공부합니다 "
    "Tiếng Việt rất khó được ế ệ ộ አማርኛ ქართული հայերեն ਪੰਜਾਬੀ தமிழ் ລາວ မြန်မာ ខ្មែរ"
).split()
_EMOJI = ["👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "1️⃣", "❤️", "🧑🏿‍🚀", "😀"]
_SPACES = [" ", "  ", "\u00a0", "\u3000", "\u2009", "\u200b", "\t", "\u2003 ", "\u202f", "\ufeff"]
_CODE = [
    "def f(x): return x**2",
    "if (a[i] != '\\n' && b->c) { ++n; }",
    '<div class="x">&nbsp;</div>',
    "    indented = {'key': [1, 2]}",
    "SELECT * FROM t WHERE id=42;",
    "https://example.org/a?b=c&d=%20",
]
_BIDI = ["\u200e", "\u200f", "\u202a", "\u202e", "\u202c", "\u2066", "\u2069"]
_BLOCKS = [
    (0x21, 0x7F), (0xA1, 0x250), (0x370, 0x400), (0x400, 0x530), (0x531, 0x588), (0x5D0, 0x5EB),
    (0x620, 0x6D4), (0x904, 0x93A), (0x985, 0x9B2), (0xB85, 0xBBA), (0xE01, 0xE31), (0xE81, 0xEB0),
    (0x10D0, 0x10FB), (0x1100, 0x1200), (0x1200, 0x1240), (0x1780, 0x17B4), (0x2000, 0x2070),
    (0x2100, 0x2150), (0x2190, 0x2400), (0x2460, 0x2500), (0x3041, 0x3100), (0x3131, 0x318F),
    (0x4E00, 0x5000), (0xAC00, 0xAE00), (0xF900, 0xFA00), (0xFB00, 0xFB50), (0xFE70, 0xFF00),
    (0xFF01, 0xFFEF), (0x1D400, 0x1D500), (0x1F300, 0x1F600), (0x20000, 0x20100),
]  # fmt: skip


def difficult_lines(count: int, seed: int = 0) -> list[str]:
    """Return lines of all kinds in turn, the same ones each time."""
    draw = random.Random(f"difficult lines {seed}")
    kinds = (
        _sentence, _script, _marks, _emoji, _spaces, _controls, _digits, _code, _long, _mixed,
    )  # fmt: skip
    return [kinds[i % len(kinds)](draw) for i in range(count)]


def _some(draw: random.Random, least: int, most: int, make: Callable[[], str]) -> list[str]:
    return [make() for _ in range(draw.randint(least, most))]


def _char(draw: random.Random) -> str:
    while True:
        char = chr(draw.randrange(*draw.choice(_BLOCKS)))
        if unicodedata.category(char) not in ("Cn", "Cs", "Co"):
            return char


def _sentence(draw: random.Random) -> str:
    words = _some(draw, 1, 12, lambda: draw.choice(_WORDS))
    form = draw.choice(["NFC", "NFD", "NFC", "NFKD"])
    return unicodedata.normalize(form, " ".join(words) + draw.choice([".", "!", "?", "", "…"]))


def _script(draw: random.Random) -> str:
    low, high = draw.choice(_BLOCKS)
    chars = [chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 40))]
    kept = [char for char in chars if unicodedata.category(char) not in ("Cn", "Cs", "Co")]
    return "".join(char + (" " if draw.random() < 0.15 else "") for char in kept)


def _marks(draw: random.Random) -> str:
    def one() -> str:
        marks = "".join(
            chr(draw.randrange(0x300, 0x345)) for _ in range(draw.choice([0, 1, 1, 2, 3]))
        )
        return draw.choice("aeioucnsAEOzgиеغبאךกा") + marks

    return "".join(_some(draw, 1, 20, one))


def _emoji(draw: random.Random) -> str:
    return draw.choice(["", " "]).join(
        _some(draw, 1, 10, lambda: draw.choice([*_EMOJI, draw.choice(_WORDS)]))
    )


def _spaces(draw: random.Random) -> str:
    parts = _some(draw, 1, 8, lambda: draw.choice(_WORDS) + draw.choice(_SPACES))
    return draw.choice(["", *_SPACES]) + "".join(parts)


def _controls(draw: random.Random) -> str:
    odd = [*_BIDI, *map(chr, range(1, 32)), "\x7f", "\x85", "\u2028", "\ufffd", "\ufffe", "\u00ad"]
    return "".join(_some(draw, 1, 12, lambda: draw.choice([draw.choice(_WORDS), draw.choice(odd)])))


def _digits(draw: random.Random) -> str:
    def one() -> str:
        number = draw.randrange(10 ** draw.randint(1, 12))
        return draw.choice(
            [f"{number:,}", f"{number}", f"{number / 7:.3f}", f"-{number}%", "٣٤٥", "१२३"]
        )

    return draw.choice([" ", "", "/", ":"]).join(_some(draw, 1, 6, one))


def _code(draw: random.Random) -> str:
    return draw.choice(["\n", " ", "\r\n", "\n\n    "]).join(
        _some(draw, 1, 3, lambda: draw.choice(_CODE))
    )


def _long(draw: random.Random) -> str:
    part = draw.choice([draw.choice(_WORDS), _char(draw), "ab", "a", "_", "-="])
    return part * draw.randint(10, 40)


def _mixed(draw: random.Random) -> str:
    return "".join(_some(draw, 1, 40, lambda: _char(draw)))
