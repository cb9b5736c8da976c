"""Sentences of comments and docstrings begin with their subject, not with "of", "what" or "who"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {"loadtest": 200, "server": 224}  # as many as there were: they become fewer
MOST |= dict.fromkeys(
    (
        "engine",
        "exporter",
        "proto/python/tokenweir",
        "tests/engine",
        "tests/exporter",
        "tests/parity",
    ),
    0,
)
COMMENT = re.compile(r"(?:^|  )\s*# of\b.*", re.IGNORECASE | re.MULTILINE)
SENTENCE = re.compile(r"(?:^|[.:!?]\s+|\n\n)(?:Of|Who|What|Whose|Where)\b")
DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", MOST)
def test_a_sentence_begins_with_its_subject(folder: str) -> None:
    found = []
    for path in ROOT.joinpath(folder).rglob("*.py"):
        text = path.read_text() if "_pb2" not in path.name else ""  # those are generated
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DESCRIBED)]
        docs = [ast.get_docstring(node) or "" for node in nodes]
        found += [f"{path}: {comment.strip()}" for comment in COMMENT.findall(text)]
        found += [f"{path}: {doc}" for doc in docs for _ in SENTENCE.findall(doc)]

    assert len(found) <= MOST[folder], "\n".join(found)
