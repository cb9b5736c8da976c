"""Sentences of comments and docstrings begin with their subject, not with "of", "what" or "who"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "exporter", "loadtest", "proto/python/tokenweir", "server", "tests")
COMMENT = re.compile(r"(?:^|  )\s*# of\b.*", re.IGNORECASE | re.MULTILINE)
SENTENCE = re.compile(r"(?:^|[.:!?]\s+|\n\n)(?:Of|Who|What|Whose|Where)\b")
DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sentence_begins_with_its_subject(folder: str) -> None:
    found = []
    for path in ROOT.joinpath(folder).rglob("*.py"):
        text = path.read_text() if "_pb2" not in path.name else ""  # those are generated
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DESCRIBED)]
        docs = [ast.get_docstring(node) or "" for node in nodes]
        found += [f"{path}: {comment.strip()}" for comment in COMMENT.findall(text)]
        found += [f"{path}: {doc}" for doc in docs for _ in SENTENCE.findall(doc)]

    assert not found, "\n".join(found)
