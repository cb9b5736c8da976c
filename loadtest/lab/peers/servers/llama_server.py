"""llama.cpp's own `llama-server`, asked by OpenAI's protocol."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from loadtest.lab.peers.servers.launch import MODEL, Launch
from loadtest.lab.peers.worker import LoadOptions

_VARIABLE = "LLAMA_SERVER"
_CONTEXT_STEP = 256  # positions: a sequence's cache is a multiple of it


def launch(options: LoadOptions, port: int) -> Launch:
    """Return the command with a place for every stream; FileNotFoundError without the program."""
    binary = find_binary()
    positions = -(-options.max_tokens // _CONTEXT_STEP) * _CONTEXT_STEP
    arguments = {
        "--model": Path(options.directory) / f"{options.weights}.gguf",
        "--alias": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": options.num_threads,
        "--threads-batch": options.num_threads,
        "--parallel": options.max_concurrency,
        "--ctx-size": positions * options.max_concurrency,
        "--cache-ram": 0,  # no prompt comes again
    }
    if options.weights == "f32":  # keys and values too, as the others have them
        arguments |= {"--cache-type-k": "f32", "--cache-type-v": "f32"}
    command = [binary, "--offline", "--no-webui"]
    command += [] if options.setting.get("repacked", 1) else ["--no-repack"]
    command += [str(word) for pair in arguments.items() for word in pair]
    address = f"http://127.0.0.1:{port}/v1"
    return Launch(tuple(command), address, {"llama.cpp": _version(binary)}, {"temperature": 0})


def find_binary() -> str:
    """Return where the program is; FileNotFoundError says how it is found."""
    binary = os.environ.get(_VARIABLE) or shutil.which("llama-server")
    if not binary:
        raise FileNotFoundError(f"llama-server is not on the PATH; set {_VARIABLE} to it")
    return binary


def _version(binary: str) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.+)", said.stderr + said.stdout)
    return found[1] if found else "unknown"
