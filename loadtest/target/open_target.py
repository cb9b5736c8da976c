"""Chooses the protocol that an address speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadtest.target.kserve_grpc import SCHEME, KserveGrpc
from loadtest.target.target import Target
from loadtest.target.tokenweir_grpc import TokenweirGrpc

# More arguments of the client: credentials, a token, and that of the admin port. Called in every
# process that sends, since credentials cannot be given from one to another; no report has them.
ClientArguments = Callable[[], Mapping[str, Any]]
Connect = Callable[[], Target]


def open_target(
    address: str,
    model: str,
    timeout: float,
    client_arguments: ClientArguments,
    admin_address: str | None = None,
) -> Target:
    """Return a model at an address; nothing is sent before the first call."""
    arguments = client_arguments()
    if address.startswith(("http://", "https://")):
        from loadtest.target.openai_http import OpenAiHttp  # other targets do not need its packages

        return OpenAiHttp(address, model, timeout, arguments.get("token"))
    if address.startswith(SCHEME):
        credentials, token = arguments.get("credentials"), arguments.get("token")
        return KserveGrpc(address.removeprefix(SCHEME), model, timeout, credentials, token)
    return TokenweirGrpc(address, model, timeout, arguments, admin_address)
