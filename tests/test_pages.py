"""The pages: commands exist with their options, files and links are there, sentences are short."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import mypy.api
import pytest
from packaging.requirements import Requirement

from server.cli.app import cli
from server.cli.exit_codes import CommandError

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in ROOT.glob("**/*.md") if path.relative_to(ROOT).parts[0][0] != ".")
GENERATED = "<!-- Made by `python -m "  # how a page begins that a program writes
MAX_WORDS, MAX_PARAGRAPH = 1000, 400  # words of a page without code; characters
RELATIVES = ("Of", "Who", "What", "Whose", "Where")
# Nothing of ours is in them.
SHELL = {
    ".",
    "cat",
    "cmake",
    "cp",
    "curl",
    "cut",
    "do",
    "docker",
    "done)",
    "journalctl",
    "kubectl",
    "lm_eval",
    "mkdir",
    "node",
    "npm",
    "openssl",
    "perf_analyzer",
    "platforms=$(for",
    "ray",
    "split",
    "systemctl",
    "tar",
    "xz",
}
SHELLS = ("sh", "bash")
# Files that a reader has: texts of their own, a model they have downloaded, an older tree.
YOURS = {"pairs.tsv", "book.txt", "lines.txt", "../old", "runs/model_step_100000.pt"}
YOURS |= {"requests.jsonl", "trace.jsonl"}
YOURS |= {"sentence-transformers/all-MiniLM-L6-v2", "openai-community/gpt2"}  # on the Hub
YOURS |= {"downloads/llama", "downloads/iwslt14", "downloads/opus-mt", "key.pem", "key.pub"}
YOURS |= {"server.pem", "server.key", "ca.pem", "client.pem", "client.key"}
BY_MAKE = {"install": ".venv", "demo": "demo"}
WRITTEN = {"--out", "--json", "--png", "--target"}  # options of programs that are not ours to parse
WRITERS = {"exporter.examples.own_class", "venv"}  # modules whose argument is what they write
A_FILE = re.compile(r".*/.*|.*\*|.*\.(conll|json|jsonl|png|toml|tsv|txt)")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Block(NamedTuple):
    """A block of code in a page."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def _blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            yield Block(path, text.count("\n", 0, found.start()) + 2, found[1], found[2])


BLOCKS = list(_blocks())


def _commands(script: str) -> Iterator[list[str]]:
    """Give the words of every command; of a here-document those that begin it."""
    for words in _with_redirects(_HERE.sub("", script)):
        yield [word for word in words if not isinstance(word, Redirect)]


_HERE = re.compile(r"<<'(\w+)'\n(.*?)^\1$", re.M | re.S)


class Redirect(str):
    """A file that a command reads from, or writes to."""

    reads: bool


def _with_redirects(script: str) -> Iterator[list[str]]:
    script = script.replace("\\\n", " ")
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if not words and re.match("[A-Z_]+=", word):
                continue  # a variable of the command
            if set(word) <= set("|&;"):
                yield words
                words = []
            elif set(word) <= set("<>"):
                file = Redirect(next(lexer))
                file.reads = "<" in word
                words.append(file)
            else:
                words.append(word)
        if words:
            yield words


def _check_tokenweir(words: list[str]) -> None:
    command = cli.commands[words[0]]
    while isinstance(command, click.Group) and words[1:2] and words[1] in command.commands:
        command, words = command.commands[words[1]], words[1:]
    with click.Context(command, info_name=words[0]) as context:
        given, left, _ = command.make_parser(context).parse_args(list(words[1:]))
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        required = [p for p in command.params if p.required]
        for param in command.params:
            value = given.get(str(param.name))
            if isinstance(value, str | list | tuple) and not isinstance(param.type, click.Path):
                param.type_cast_value(context, value)  # BadParameter: it takes no such value
    assert not left or any(p.nargs == -1 for p in arguments), f"too many arguments: {left}"
    missing = [p.name for p in required if given.get(str(p.name)) in (None, ())]
    assert not missing, f"{words[0]} lacks {missing}"


@pytest.mark.parametrize(
    "line",
    ["train datez --out x", "export a --out b --weights int3", "generate --model m --beam four x"],
)
def test_a_command_with_a_value_that_it_does_not_take_would_be_seen(line: str) -> None:
    with pytest.raises(click.BadParameter):
        _check_tokenweir(line.split())


def _check_module(name: str, options: list[str]) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"there is no module {name}"
    home = Path(spec.origin)
    sources = home.parent.rglob("*.py") if home.name == "__init__.py" else [home]
    source = "\n".join(path.read_text() for path in sources)
    unknown = [word for word in options if word.startswith("--") and f'"{word}"' not in source]
    assert not unknown, f"{name} has no {unknown}"


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {word for word in words if "=" not in word} <= set(targets)


def _check_pip(words: list[str]) -> None:
    for word in words:
        if word.startswith((".[", "tokenweir[")):
            extras = Requirement("tokenweir" + word[word.index("[") :]).extras
            assert extras <= set(EXTRAS), f"there is no extra {extras - set(EXTRAS)}"
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).exists()


class Files(NamedTuple):
    """The files that a command names."""

    read: list[str]
    written: list[str]


def _files(words: list[str]) -> Files:
    files = Files([], [])
    for word in words:
        if isinstance(word, Redirect):
            (files.read if word.reads else files.written).append(word)
    program, *rest = [word for word in words if not isinstance(word, Redirect)]
    if program == "tokenweir":
        return _add_of_ours(files, rest)
    if program == "make":
        files.written.extend(BY_MAKE[word] for word in rest if word in BY_MAKE)
        return files
    if program in ("mkdir", "split"):
        files.written.append(rest[-1])
        return files
    if program.startswith("python") and rest[0] == "-m":
        if rest[1] in WRITERS:
            files.written.append(rest[2])
            return files
        rest = rest[2:]
    elif program not in (".", "cat", "pip", "pytest", "tar"):
        return files  # it names none
    for before, word in zip(["", *rest], rest, strict=False):
        if before in WRITTEN:
            files.written.append(word)
        elif A_FILE.fullmatch(word) and not word.startswith(("-", "$")):
            files.read.append(word)
    return files


def _add_of_ours(files: Files, words: list[str]) -> Files:
    """Tell what is read from what is written by the types of options and arguments."""
    command = cli.commands[words[0]]
    while isinstance(command, click.Group) and words[1:2] and words[1] in command.commands:
        command, words = command.commands[words[1]], words[1:]
    with click.Context(command, info_name=words[0]) as context:
        given, _, _ = command.make_parser(context).parse_args(list(words[1:]))
    for param in command.params:
        value = given.get(str(param.name))
        if isinstance(param.type, click.Path) and isinstance(value, str | list | tuple):
            names = [value] if isinstance(value, str) else list(value)
            (files.read if param.type.exists else files.written).extend(names)
    return files


def _missing(blocks: Iterable[Block], made: set[str]) -> list[str]:
    """Return the files that are neither there nor made before, and add what is made."""
    missing = []
    for block in blocks:
        for _, text in _HERE.findall(block.text):
            made |= set(re.findall(r'"([^"\n]+)"', text))
        for words in _with_redirects(_HERE.sub("", block.text)):
            files = _files(words)
            missing += [f"{block}: {name}" for name in files.read if not _is_there(name, made)]
            made |= set(files.written)
    return missing


def _is_there(name: str, made: set[str]) -> bool:
    name = name.rstrip("*")
    folders = {str(folder) for folder in Path(name).parents}
    return (
        "://" in name or bool({name, *folders} & (made | YOURS) - {"."}) or (ROOT / name).exists()
    )


def _read_before(path: Path) -> Iterator[Path]:
    """Yield the pages that come before one: those of all and of its room, and those it links to."""
    if path != ROOT / "README.md":
        yield ROOT / "README.md"
        room = ROOT / path.relative_to(ROOT).parts[0] / "README.md"
        if room != path and room.exists():
            yield room
        for link in re.findall(r"\]\(([\w./-]+\.md)", path.read_text()):
            yield (path.parent / link).resolve()


def _shell(path: Path) -> list[Block]:
    return [block for block in BLOCKS if block.path == path and block.language in SHELLS]


def test_files_that_commands_name_are_there_or_made_before() -> None:
    missing = []
    for path in PAGES:
        made: set[str] = set()
        for before in _read_before(path):
            _missing(_shell(before), made)
        missing += _missing(_shell(path), made)

    assert not missing


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("tokenweir export checkpoints/datez --out p", "checkpoints/datez"),
        ("tokenweir export checkpoints/a --out p\ntokenweir serve q", "q"),
        ("tokenweir train translation --pairs pears.tsv --check", "pears.tsv"),
        ("tokenweir diff a b --text lines.text", "lines.text"),
        ("tokenweir generate --model m --json - < in.txt > out.jsonl", "in.txt"),
        ("python -m loadtest.lab.regression packages/gpt3 --out r", "packages/gpt3"),
        ("pip install -c constraint.txt .", "constraint.txt"),
        ("pytest tests/engines -q", "tests/engines"),
        ("cat carry.parts.* | tar -C sites -xJf -", "carry.parts.*"),
        ("python - <<'END'\nsave('a')\nEND\ntokenweir import b --out c", "b"),
    ],
)
def test_a_file_that_nobody_has_made_would_be_seen(script: str, missing: str) -> None:
    block = Block(ROOT / "README.md", 1, "sh", f"{script}\n")

    assert f"{block}: {missing}" in _missing([block], set())


def test_what_an_earlier_command_makes_is_there() -> None:
    script = (
        "python - <<'END'\nsave(\"downloads/b\")\nEND\n"
        "tokenweir import downloads/b --out c > log.txt\n"
        "tokenweir export c --out p\n"
        "tokenweir verify p c && cat log.txt\n"
    )

    assert not _missing([Block(ROOT / "README.md", 1, "sh", script)], set())


def _models(blocks: Iterable[Block]) -> tuple[set[str], set[str]]:
    """Return the models that commands serve, and those that commands call."""
    served, called = set[str](), set[str]()
    for block in blocks:
        for program, *words in _commands(block.text):
            if program == "tokenweir" and words[0] == "serve":
                served |= {Path(word).name for word in words if "/" in word}
            elif program == "tokenweir" and "--model" in words:
                called.add(words[words.index("--model") + 1])
    return served, called


def test_models_that_are_called_are_served() -> None:
    for path in PAGES:
        pages = (*_read_before(path), path)
        served, _ = _models(block for before in pages for block in _shell(before))
        _, called = _models(_shell(path))

        assert called <= served, path


def test_a_model_that_nobody_serves_would_be_seen() -> None:
    script = "tokenweir serve packages/dates --port 1\ntokenweir generate --model text x\n"

    assert _models([Block(ROOT / "README.md", 1, "sh", script)]) == ({"dates"}, {"text"})


def _check_folders(settings: list[str]) -> None:
    for setting in settings:
        folders = setting.partition("=")[2].split(":")
        here = [folder.removeprefix("$PWD/") for folder in folders if folder != "$PWD/site"]
        assert all(folder == "$PWD" or (ROOT / folder).is_dir() for folder in here), setting


def _named_extras(text: str) -> set[str]:
    """Return the extras that a text names, in commands and beside them."""
    found = re.findall(r"(?:tokenweir|\.)\[([\w,]+)\]", text)
    return {extra for names in found for extra in names.split(",")}


def test_extras_that_are_named_are_there() -> None:
    for path in PAGES:
        assert _named_extras(path.read_text()) <= set(EXTRAS), path


def test_extras_are_found_in_a_table_too() -> None:
    assert _named_extras("| `'.[serve,cpu]'` | tokenweir[loadtests] |") == {
        "serve",
        "cpu",
        "loadtests",
    }


def test_commands_exist_with_their_options() -> None:
    wrong = []
    for block in BLOCKS:
        for words in _commands(block.text) if block.language in SHELLS else ():
            try:
                _check_command(words)
            except (AssertionError, KeyError, click.ClickException) as error:
                wrong.append(f"{block} {' '.join(words)}: {error}")

    assert not wrong


def _check_command(words: list[str]) -> None:
    if words[:2] == ["taskset", "-c"]:  # and its cores
        words = words[3:]
    program, *rest = words
    if program == "tokenweir":
        _check_tokenweir(rest)
    elif program in ("python", "python3") and rest[0] == "-m":
        _check_module(rest[1], rest[2:])
    elif program == "make":
        _check_make(rest)
    elif program == "pip":
        _check_pip(rest)
    elif program == "export":
        _check_folders(rest)
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if not word.startswith("-"))
    else:
        assert program in SHELL or words == ["python", "-"], f"nothing checks {words}"


def _installed(words: list[str]) -> set[str]:
    """Return the extras that a pip command brings, of a clone."""
    found = [Requirement(f"tokenweir{word[1:]}") for word in words if word.startswith(".[")]
    return {extra for one in found for extra in one.extras}


@pytest.mark.parametrize("block", [b for b in BLOCKS if "pip install" in b.text], ids=str)
def test_what_a_block_installs_is_enough_for_its_commands(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.cli.extras.find_spec", lambda module: None)
    commands = list(_commands(block.text))
    brought = {extra for words in commands for extra in _installed(words)}

    for words in commands:
        if words[0] == "tokenweir":
            with pytest.raises(CommandError) as refused:
                cli.commands[words[1]].callback()  # type: ignore[misc]  # says what it needs first
            ways = re.findall(r"'tokenweir\[([\w,]+)\]'", str(refused.value))
            assert any(set(needed.split(",")) <= brought for needed in ways), words


def _python_problems(texts: Iterable[str], folder: Path) -> str:
    """Return what mypy says of programs: names, arguments and their types."""
    for number, text in enumerate(texts):
        (folder / f"block_{number}.py").write_text(text)
    return mypy.api.run([f"--config-file={ROOT / 'pyproject.toml'}", str(folder)])[0]


def test_python_calls_what_is_there(tmp_path: Path) -> None:
    texts = [block.text for block in BLOCKS if block.language == "python"]

    assert len(texts) >= 4
    assert _python_problems(texts, tmp_path).startswith("Success")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("beam=4", "beems=4"), (".sequences", ".sequence"), ("client.score(", "client.scores(")],
)
def test_python_that_calls_what_is_not_there_would_be_seen(
    right: str, wrong: str, tmp_path: Path
) -> None:
    texts = [block.text for block in BLOCKS if block.language == "python" and right in block.text]

    assert "Found 1 error" in _python_problems([texts[0].replace(right, wrong)], tmp_path)


def test_links_lead_somewhere() -> None:
    links = [
        (path, link) for path in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    ]

    for path, link in links:
        file, _, anchor = link.partition("#")
        if "://" in file:
            continue
        target = (path.parent / file) if file else path
        assert target.exists(), (path, link)
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, (path, link)


def test_files_of_ours_that_are_named_are_there() -> None:
    rooms = "engine|exporter|server|loadtest|proto|tests"
    for path in PAGES:
        names = re.findall(rf"`((?:{rooms})/[\w./*-]*)`", path.read_text())
        names += _responsible_files(path)

        missing = [name for name in names if not list(ROOT.glob(name.rstrip("/")))]
        assert not missing, path


def _responsible_files(path: Path) -> list[str]:
    """Return the files of the table that opens the README of a folder, from the root."""
    table = path.read_text().partition("| responsibility | file |\n|---|---|\n")[2]
    rows = table.partition("\n\n")[0]
    room = path.parent.relative_to(ROOT)
    files = "".join(row.split("|")[2] for row in rows.splitlines())
    return [str(room / name) for name in re.findall(r"`([\w./*-]+)`", files)]


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and points of lists, without tables, titles and code."""
    for found in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", _prose(text)):
        if not found.lstrip().startswith(("|", "#", "<!--", "![")):
            yield re.sub(r"\]\([^)]*\)", "]", found.strip())


def _sentences(text: str) -> list[str]:
    found = [re.split(r"(?<=[.:?!])\s+", paragraph) for paragraph in _paragraphs(text)]
    return [sentence.lstrip("-* ") for sentences in found for sentence in sentences if sentence]


def test_a_page_is_short_and_so_are_its_paragraphs() -> None:
    for path in PAGES:
        text = path.read_text()

        assert text.startswith(GENERATED) or len(_prose(text).split()) <= MAX_WORDS, path
        assert [found for found in _paragraphs(text) if len(found) > MAX_PARAGRAPH] == [], path


def test_long_paragraphs_would_be_seen_in_a_list_too() -> None:
    long = "word " * 100

    assert max(map(len, _paragraphs(f"# Title\n\n- a\n- {long}\n- b\n"))) > MAX_PARAGRAPH
    assert not any(_paragraphs(f"```sh\n{long}\n```\n\n| {long} |\n"))


def test_sentences_begin_with_their_subject() -> None:
    sentences = [sentence for path in PAGES for sentence in _sentences(path.read_text())]

    relative = [one for one in sentences if one.split()[0].strip("*") in RELATIVES]
    assert len(relative) <= 0.02 * len(sentences), relative
