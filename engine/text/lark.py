"""Values in llguidance's dialect of Lark, in which a constraint on a text is written."""

from __future__ import annotations

import json
from collections.abc import Mapping

# White space between things. A weak model would else write nothing more than that.
_JSON_OPTIONS: Mapping[str, object] = {"x-guidance": {"whitespace_pattern": r"[ \n]?"}}


def literal(value: object) -> str:
    """Return a string, or another value of JSON, as a rule has it."""
    return json.dumps(value).replace("\x7f", r"\u007f")  # which llguidance cannot read as it is


def json_rule(schema: object) -> str:
    """Return the right side of a rule for the JSON that fits a schema."""
    return f"%json {literal({**_JSON_OPTIONS, **schema} if isinstance(schema, dict) else schema)}"
