"""Imports a model that another library saved, and compares it with its original."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import CheckpointError
from exporter.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_replaceable,
    read_config,
    remove_other_files,
)
from exporter.compare.original import NOT_COMPARED, Compared, compare_with_original
from exporter.files import replace_file, stage
from exporter.huggingface import Imported, Languages, import_checkpoint
from exporter.progress import Progress, no_progress
from exporter.toolkits import import_toolkit_checkpoint, is_toolkit_checkpoint


@dataclass(frozen=True)
class Options:
    """A person's choices for an import."""

    max_len: int | None = None
    languages: Languages = field(default_factory=Languages)  # Hugging Face only
    codes: Path | None = None  # OpenNMT-py and fairseq only
    compares: bool = True


def import_model(
    path: Path, out: Path, options: Options = Options(), progress: Progress = no_progress
) -> tuple[Imported, str]:
    """Write the model at `path` to `out` as a checkpoint, which says what it was compared with.

    Models of Hugging Face are held against their own class of transformers. Returns what was
    imported, and that line. Raises CheckpointError, and then writes nothing, if the model cannot
    be imported, or differs from its original.
    """
    check_replaceable(out)
    with stage(out, CheckpointError) as staging:
        made, compared = staging.directory, Compared(NOT_COMPARED)
        if is_toolkit_checkpoint(path):
            imported = import_toolkit_checkpoint(
                path, made, progress, max_len=options.max_len, codes=options.codes
            )
        else:
            imported = import_checkpoint(
                path, made, progress, languages=options.languages, max_len=options.max_len
            )
            if options.compares:
                compared = compare_with_original(
                    path, made, options.languages, progress, asked_len=options.max_len
                )
        imported = replace(imported, notes=(*imported.notes, *compared.notes))
        said = compared.said
        named = {"task": out.resolve().name, "original": said}
        config = read_config(made).model_copy(update=named)
        replace_file(made / CONFIG_NAME, config.content())
        if not out.exists():
            staging.publish()
            return imported, said
        names = sorted(os.listdir(made), key=lambda name: name == WEIGHTS_NAME)  # which come last
        for name in names:
            os.replace(made / name, out / name)
        remove_other_files(out, names)
    return imported, said
