"""Refuses an adapter that strangers could reach."""

from __future__ import annotations

from tokenweir import AsyncClient, Unauthenticated

from engine.errors import ConfigError
from server.adapters.config import HttpConfig, KserveConfig
from server.hosts import is_loopback

_WAYS_OUT = "listen on 127.0.0.1, or type --insecure to take calls from everywhere"


async def check_reach(
    config: HttpConfig | KserveConfig, client: AsyncClient, *, has_token: bool
) -> None:
    """Raise ConfigError if strangers on other machines could call the server behind.

    `has_token` says whether requests without a token go on with one of this server. Raises
    TokenweirClientError if the server behind cannot be asked.
    """
    host = config.host
    if is_loopback(host):
        return
    if config.tls.cert is None:
        raise ConfigError(
            f"host ({host}) is reached from other machines, so calls need to be encrypted; give "
            f"--listen-tls-cert and --listen-tls-key, {_WAYS_OUT}"
        )
    if config.tls.client_ca is not None:
        return
    if has_token:
        raise ConfigError(
            f"host ({host}) is reached from other machines, and their calls would go on with "
            f"--token (TOKENWEIR_TOKEN); leave it out, {_WAYS_OUT}"
        )
    try:
        await client.models()
    except Unauthenticated:
        return
    raise ConfigError(
        f"host ({host}) is reached from other machines, and the server behind has no "
        f"authentication; start that with --tokens, ask clients for certificates "
        f"(--listen-tls-client-ca), {_WAYS_OUT}"
    )
