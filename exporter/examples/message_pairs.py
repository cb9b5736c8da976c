"""Pairs to train a translation on, from the message catalogues of the programs on a machine.

python -m exporter.examples.message_pairs vi --out vi.tsv
tokenweir train translation --pairs vi.tsv --out checkpoints/vi
"""

import argparse
import gettext
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/usr/share/locale")
MAX_CHARACTERS = 160
NAMES = "iso_"  # catalogues that begin so have names of languages, places and currencies


def read_pairs(language: str, folder: Path | None = None) -> dict[str, str]:
    """Return the English messages of two words or more, each with its first translation."""
    pairs: dict[str, str] = {}
    for path in sorted(((folder or FOLDER) / language / "LC_MESSAGES").glob("*.mo")):
        if not path.name.startswith(NAMES):
            for source, target in read_catalogue(path):
                if " " in source and target and source != target:
                    pairs.setdefault(source, target)
    return {s: t for s, t in pairs.items() if max(len(s), len(t)) <= MAX_CHARACTERS}


def read_catalogue(path: Path) -> Iterator[tuple[str, str]]:
    """Yield messages and translations, a line each; of plurals the first, the context left out."""
    try:
        with path.open("rb") as file:
            messages = vars(gettext.GNUTranslations(file))["_catalog"]
    except (OSError, UnicodeDecodeError):
        return  # damaged, or in an encoding that it does not have
    for key, target in messages.items():
        source, number = key if isinstance(key, tuple) else (key, 0)
        if number == 0:
            yield " ".join(source.split("\x04")[-1].split()), " ".join(target.split())


def write_pairs(language: str, out: Path) -> str:
    pairs = read_pairs(language)
    out.write_text("".join(f"{s}\t{t}\n" for s, t in pairs.items()), encoding="utf-8")
    return f"{len(pairs):,} pairs in {out}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("language", help="a folder of /usr/share/locale")
    parser.add_argument("--out", type=Path, required=True)
    print(write_pairs(**vars(parser.parse_args())))
