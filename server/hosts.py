"""Hosts to listen on: their addresses, and whether other machines reach them."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host, or all addresses of a name."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    found = addresses_of(host)
    return bool(found) and all(ipaddress.ip_address(one).is_loopback for one in found)


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host, those of IPv4 first; none if nobody knows it."""
    if host.startswith("unix:"):  # a resolver would be asked for it
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(place[0]) for *_, place in found}, key=lambda one: (":" in one, one))


def family_of(host: str) -> socket.AddressFamily:
    """Return how one socket listens on a host: by IPv6 where it has no other address."""
    is_ipv6 = ":" in next(iter(addresses_of(host)), host)
    return socket.AF_INET6 if is_ipv6 else socket.AF_INET
