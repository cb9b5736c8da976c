"""Downloads of models from the Hub of Hugging Face, by its own library and into its own cache.

HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import errno
from pathlib import Path

from engine.errors import PackageError, PackageUnreachable

_DESCRIPTIONS = ["*.json", "*.txt", "*.model", "*.spm", "*.bpe", "*.jinja"]
_OF_OTHERS = ["onnx/*", "openvino/*", "coreml/*", "original/*", "*.fp16.safetensors"]


def download(name: str, revision: str | None) -> Path:
    """Return the directory of a model in the cache of the Hub; what is missing there is fetched.

    Weights are safetensors, or PyTorch's own files where it has no others. Raises PackageError if
    there is no such model or it may not be read, PackageUnreachable if the Hub cannot be asked.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ModuleNotFoundError as error:
        raise PackageError(
            f"there is no {name} here, and models of the Hub are fetched with huggingface_hub; "
            "install it with: pip install 'tokenweir[import]'"
        ) from error

    def fetch(weights: str) -> Path:
        wanted = [*_DESCRIPTIONS, weights]
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=wanted, ignore_patterns=_OF_OTHERS
            )
        )

    at = f"{name}@{revision}" if revision else name
    try:
        found = fetch("*.safetensors")
        return found if any(found.glob("*.safetensors")) else fetch("pytorch_model*.bin*")
    except errors.GatedRepoError as error:
        raise PackageError(
            f"{at} is only for those whom its owner lets in: ask for it on its page, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PackageError(f"the Hub has {name}, but no revision {revision} of it") from error
    except errors.LocalEntryNotFoundError as error:
        raise PackageUnreachable(
            f"there is no {at} here nor in the cache of the Hub, and the Hub cannot be asked; try "
            "again with a connection and without HF_HUB_OFFLINE, or give a directory"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise PackageError(
            f"there is no {at} here, and the Hub has none for you; give a directory, the full "
            "ORG/NAME, or HF_TOKEN for a private one"
        ) from error
    except Exception as error:  # also of its HTTP client, which is another in each release
        if isinstance(error, OSError) and (
            error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
        ):
            raise PackageError(
                f"{at} of the Hub cannot be kept in {error.filename or constants.HF_HUB_CACHE}: "
                f"{error.strerror}; set HF_HOME to a directory with room that this user may "
                "write to"
            ) from error
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise PackageUnreachable(f"{at} cannot be fetched from the Hub: {reason}") from error
