"""Verifies a package in a process of its own, which gives back what it takes of a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from server.cli.exit_codes import FAILED, CommandError

if TYPE_CHECKING:
    from engine.package.manifest import Target


def verify_apart(package: Path, checkpoint: Path, target: Target, config: EngineConfig) -> None:
    """Compare a package with its checkpoint where an engine with these settings runs it.

    The process prints what `tokenweir verify` prints. Raises CommandError if it fails.
    """
    from engine.cuda.certificate import verify_options
    from server.packages.build import COMMAND

    options = verify_options(config) if config.device_for(target) == "cuda" else []
    command = [*COMMAND, "verify", str(package), str(checkpoint), *options]
    code = subprocess.run(command).returncode
    if code:
        raise CommandError(
            f"{package} was not shown to match {checkpoint}, so it is not served",
            code if code > 0 else FAILED,
        )
