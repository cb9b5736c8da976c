"""Lets calls in by the token or certificate that they show: as its tenant, within its quota."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from engine.errors import FieldViolation, MalformedMessage, PermissionDenied
from server.api import METHODS
from server.auth.certified import forwarded_name
from server.auth.quotas import Lease, Quotas
from server.auth.tls import server_credentials
from server.auth.tokens import Identity, TokenFile
from server.calls.call_server import ServerCall
from server.config import GatewayConfig
from server.gateway.request_head import RequestHead, stamped
from server.listening import check_ports_are_free
from server.settings import Settings

_CUT_SHORT = (None, grpc.StatusCode.DEADLINE_EXCEEDED)
_MAX_ECHO = 64  # characters of a name that an error repeats, and of a tenant


def check_access(config: Settings) -> None:
    """Raise ConfigError for certificates, tokens and ports that cannot be used."""
    server_credentials(config.tls)
    for path in filter(None, (config.auth.tokens, config.admin.tokens)):
        TokenFile(path)
    check_ports_are_free(
        ("--port", config.listen.host, config.listen.port),
        ("--admin-port", config.listen.host, config.admin.port or 0),
        ("--http-port", config.listen.host, config.http.port or 0),
        ("--metrics-port", config.metrics.host, config.metrics.port or 0),
    )


class Authenticator:
    """Knows the callers, if tokens or certificates are asked for; any thread may ask it."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raise ConfigError if the file of tokens cannot be used."""
        self._tokens = None if config.auth.tokens is None else TokenFile(config.auth.tokens)
        self._asks_certificates = config.tls.client_ca is not None
        self._quotas = Quotas()

    def identity(self, call: ServerCall) -> Identity | None:
        """Return the caller, None if nobody is asked; Unauthenticated without a known token.

        The name on the caller's certificate counts if no tokens are asked for. The socket of this
        machine asks for none: its caller tells the name on the certificate that it was shown.
        """
        if self._tokens is not None:
            return self._tokens.identity(call.invocation_metadata())
        if not self._asks_certificates:
            return None
        is_local = call.peer().startswith(b"unix:")
        name = forwarded_name(call.invocation_metadata()) if is_local else call.certified_name()
        return None if name is None else Identity(name[:_MAX_ECHO])

    def usable_models(self, call: ServerCall) -> frozenset[str] | None:
        """Return the models that the caller may use, None for all; as `identity` raises."""
        identity = self.identity(call)
        return None if identity is None else identity.models

    def identified(
        self, identity: Identity, method: str, request: bytes, head: RequestHead
    ) -> tuple[bytes, RequestHead]:
        """Return a call as that of its identity, whatever its message says of that.

        The message may ask for a later turn than the identity has, not for an earlier one. Raises
        MalformedMessage, and PermissionDenied if the identity may not use the model.
        """
        if not head.is_readable:  # an appended tenant might not be read as such
            what = f"{len(request)} bytes are not a request of {method}"
            raise MalformedMessage([FieldViolation("request", what)])
        if identity.models is not None and head.model not in identity.models:
            raise PermissionDenied(
                f"the token of tenant {identity.tenant} is not for model "
                f"{head.model[:_MAX_ECHO]!a}; it is for {', '.join(sorted(identity.models))}"
            )
        priority = max(head.priority, identity.max_priority)
        head = replace(head, tenant=identity.tenant, priority=priority)
        return stamped(method, request, head), head

    def acquire(self, identity: Identity) -> Lease:
        """Count a call until `release`; TenantQuota if its tenant has had enough for now."""
        return self._quotas.acquire(identity)

    def release(self, lease: Lease, call: ServerCall) -> None:
        """Count a call as ended, with what it took."""
        metered = lease.identity.tokens_per_minute is not None
        self._quotas.release(lease, _num_tokens(call, lease) if metered else 0)


def _num_tokens(call: ServerCall, lease: Lease) -> int | None:
    """Return the tokens that an answer tells; None if nothing was told, because nobody waited.

    A stream that was cut short does not tell: it has as many as was expected, or as its messages
    where these are more. One that is joined has many in a message, and its prompt was read.
    """
    if not call.last_message:
        return None if call.code in _CUT_SHORT else 0
    try:
        kind = GetMessageClass(METHODS[call.method].output_type)
        answer: Any = kind.FromString(call.last_message)
    except DecodeError:
        return 0
    usage = getattr(answer, "summary", answer).usage
    num_tokens = usage.input_tokens + usage.output_tokens + usage.discarded_tokens
    return int(num_tokens or max(lease.reserved, getattr(answer, "sequence_number", 0)))
