"""Takes the weights of a model out of an original, naming all that does not fit at once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.wording import listed
from exporter.checkpoint import ModelWeight, model_weights
from exporter.huggingface.conversion import NameTable, Shape, StoredWeight, rows_of
from exporter.huggingface.family import Family
from exporter.huggingface.weights.stored import FLOATS, StoredWeights
from exporter.models import TransformerConfig

_TIED = ("decoder.output", "source_embeddings.token", "decoder.embeddings.token")
_COMPUTED = ".embed_positions.weight"
_WRAPPED = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class FoundWeight(NamedTuple):
    """One of our weights, and where it was found."""

    name: str  # ours
    shape: Shape
    stored: str | None  # None: zeros
    how: StoredWeight

    def read(self, stored: StoredWeights) -> Tensor:
        """Return our weight, in float32."""
        if self.stored is None:
            return torch.zeros(self.shape)
        return self.how.extract(stored[self.stored].read())


def find_weights(
    stored: StoredWeights, family: Family, config: TransformerConfig, directory: Path
) -> list[FoundWeight]:
    """Find every weight of our model; CheckpointError names all that does not fit at once.

    The original may have learned more positions than ours, of which ours has the first.
    """
    table, found, used = family.weights(config), list[FoundWeight](), set[str]()
    problems: defaultdict[str, list[str]] = defaultdict(list)
    for weight in model_weights(config):
        entry = _entry(table, weight)
        names = _there(entry.names, stored, family)
        if names and weight.name.endswith("positions.weight"):
            given, asked = stored[names[0]].shape, entry.stored_shape(weight.shape)
            if given > asked and given[1:] == asked[1:]:
                first = rows_of(0, weight.shape[0], weight.shape[0] + given[0] - asked[0])
                entry = replace(entry, steps=(*entry.steps, first))
        used.update(names)
        if not names and not entry.optional:
            problems["missing weights"].append(entry.names[0])
        if misfit := _misfit(names, stored, entry.stored_shape(weight.shape)):
            what, where = misfit
            problems[what].append(where)
        found.append(FoundWeight(weight.name, weight.shape, names[0] if names else None, entry))
    for name in stored:
        if name not in used and not re.fullmatch(family.ignored, name):
            problems["unexpected weights"].append(name)
    if problems:
        wrong = "; ".join(
            f"{what}: {listed(dict.fromkeys(names))}" for what, names in problems.items()
        )
        raise CheckpointError(
            f"{directory} does not fit its {family.options_name}: {wrong}; "
            "give the weights that were saved with this configuration"
        )
    return found


def without_wrappers(
    stored: StoredWeights, table: NameTable, family: Family
) -> tuple[StoredWeights, list[str]]:
    """Return the weights by the names that they had before a trainer wrapped the model, and a note.

    A wrapper's prefix of names is taken off if most are known without it only; the names of
    torch's own wrappers stand nowhere else, and are taken off wherever they are.
    """
    known = {name for entry in table.values() for name in entry.names}
    known |= {name.removeprefix(family.body) for name in known}

    def is_known(name: str) -> bool:
        return _LAYER.sub("{i}", name) in known

    names = {name: _WRAPPED.sub("", name) for name in stored}
    others = [name for name, inner in names.items() if not is_known(inner)]
    prefixes = Counter(
        inner[:end]
        for inner in map(names.__getitem__, others)
        for end in (dot.end() for dot in re.finditer(r"\.", inner))
        if is_known(inner[end:])
    )
    prefix, count = next(iter(prefixes.most_common(1)), ("", 0))
    prefix = prefix if 2 * count > len(names) else ""
    names |= {name: names[name].removeprefix(prefix) for name in others}
    off = {prefix, *(found for name in stored for found in _WRAPPED.findall(name))} - {""}
    if not off or len(set(names.values())) < len(names):
        return stored, []
    note = f"{listed(sorted(off))} of wrappers is taken off the names of weights"
    return {names[name]: one for name, one in stored.items()}, [note]


def untied_as_stored(
    stored: StoredWeights, family: Family, config: TransformerConfig
) -> TransformerConfig:
    """Return the options with tables of their own where some are stored that differ.

    An output that differs counts, whatever is said to be tied; tables of the two sides do where the
    output is not tied to them.
    """
    table = family.weights(config)
    entries = [table.get(f"{name}.weight") for name in _TIED]
    output, *sides = [_there(entry.names, stored, family) if entry else [] for entry in entries]
    if config.tie_output:
        token = [name for side in sides for name in side]
        differ = _differ(stored, output[:1], token[:1])
        return config.model_copy(update={"tie_output": not differ})
    if config.share_embeddings:
        differ = _differ(stored, *(side[-1:] for side in sides))
        return config.model_copy(update={"share_embeddings": not differ})
    return config


def rounded_as_stored(stored: StoredWeights, config: TransformerConfig) -> TransformerConfig:
    """Return the options with computed places in half precision where they are stored so.

    transformers reads the table that Marian and Pegasus have in their files.
    """
    kinds = {one.dtype for name, one in stored.items() if name.endswith(_COMPUTED)}
    if config.positions.kind != "sinusoidal_halves" or not kinds <= {"float16", "bfloat16"}:
        return config
    return config.changed({"positions.dtype": min(kinds, default="float32")})


def _differ(stored: StoredWeights, one: Sequence[str], other: Sequence[str]) -> bool:
    """Say whether both tables are there and differ."""
    if not one or not other:
        return False
    return not torch.equal(stored[one[0]].read(), stored[other[0]].read())


def _there(names: Sequence[str], stored: StoredWeights, family: Family) -> list[str]:
    """Return the names that are stored, those that a file of the body alone has among them."""
    every = [form for name in names for form in (name, name.removeprefix(family.body))]
    return [name for name in dict.fromkeys(every) if name in stored]


def _entry(table: NameTable, weight: ModelWeight) -> StoredWeight:
    """Return where a weight is; where a model has it under several names, under each of them."""
    layer = _LAYER.search(weight.name)
    known = [table[kind] for name in weight.names if (kind := _LAYER.sub("{i}", name)) in table]
    assert known, f"the table of the family has no line for {weight.name}"
    names = tuple(name for entry in known for name in entry.names)
    if layer:
        names = tuple(name.replace("{i}", layer[0]) for name in names)
    return replace(known[0], names=names)


def _misfit(names: Sequence[str], stored: StoredWeights, shape: Shape) -> tuple[str, str] | None:
    """Say what is wrong with the tensors that are to be one weight, and with which of them."""
    for name in names:
        given, kind = stored[name].shape, stored[name].dtype
        if given != shape:
            asked = f"the configuration asks for {list(shape)}"
            return "wrong shapes", f"{name} is {list(given)}, {asked}"
        if kind not in FLOATS:
            return "wrong types", f"{name} is of {kind}, supported: {', '.join(FLOATS)}"
    for other in names[1:]:
        if not torch.equal(stored[names[0]].read(), stored[other].read()):
            return "weights that must be equal", f"{names[0]} and {other}"
    return None
