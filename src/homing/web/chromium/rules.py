"""Where may a session's browser go?

To `http` and `https` addresses that are public, and to the origins that its task sets serve. Not to files, not to the
browser's own pages, not to this machine, its networks, or a cloud's metadata service; that last one whatever the
settings say. Names are judged by the addresses they lead to, where the connection is made (`gateway.py`), so that a name
that changes its address, a redirect, a worker's or a socket's request is judged like any other.

Pure functions of their arguments. Not here: the connections.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
_METADATA: Final = (
    ipaddress.ip_network("169.254.0.0/16"),  # link-local, and every large cloud's metadata service in it
    ipaddress.ip_network("fe80::/10"),
    ipaddress.ip_network("fd00:ec2::/32"),
    ipaddress.ip_network("100.100.100.200/32"),
    ipaddress.ip_network("192.0.0.192/32"),
)
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class NavigationRules:
    """What a browser may reach.

    Attributes:
        origins: `scheme://host:port` that may be reached though the host is this machine or in its networks.
        private: Whether addresses of this machine and its networks may be reached at all (never a metadata service).
    """

    origins: frozenset[str] = frozenset()
    private: bool = False

    def refused_url(self, url: str) -> str | None:
        """Why one may not go there, as far as the text says it; None: one may, if the address will do."""
        if url == "about:blank":
            return None
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return "it is no URL"
        if parts.scheme not in ("http", "https"):
            return f"only http and https pages may be opened, not {parts.scheme[:20] or 'that'}:"
        if not parts.hostname:
            return "the URL names no host"
        return self.refused_host(parts.hostname, port or (443 if parts.scheme == "https" else 80))

    def refused_host(self, host: str, port: int) -> str | None:
        """Why one may not connect there, as far as the host's text says it."""
        if self._is_allowed_origin(host, port):
            return None
        name = host.rstrip(".").lower()
        if name in _METADATA_NAMES:
            return "a metadata service may not be reached"
        address = literal(host)
        if address is not None:
            return self.refused_address(address, host, port)
        if (name == "localhost" or name.endswith((".localhost", ".local", ".internal"))) and not self.private:
            return "this machine and its networks may not be reached"
        return None

    def refused_address(self, address: Address, host: str, port: int) -> str | None:
        """Why this address may not be connected to, which `host` has led to."""
        real = _unwrapped(address)
        if any(real in network for network in _METADATA):
            return "a metadata service may not be reached"
        if self.private or self._is_allowed_origin(host, port):
            return None
        if not real.is_global or real.is_multicast or real.is_reserved:
            return "this machine and its networks may not be reached"
        return None

    def _is_allowed_origin(self, host: str, port: int) -> bool:
        shown = f"[{host}]" if ":" in host else host
        return any(f"{scheme}://{shown}:{port}" in self.origins for scheme in ("http", "https"))


def with_origins(rules: NavigationRules, origins: Iterable[str]) -> NavigationRules:
    """The same rules, and these origins."""
    return NavigationRules(rules.origins | frozenset(origins), rules.private)


def literal(host: str) -> Address | None:
    """The address that the text is itself, in any of the forms that browsers take; None: it is a name.

    Source: the WHATWG URL standard's IPv4 parser: decimal, octal and hexadecimal parts, one to four of them.
    """
    text = host.strip("[]").rstrip(".").partition("%")[0]
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        pass
    if text and text.rpartition(".")[2][:1].isdigit():
        try:
            return ipaddress.IPv4Address(socket.inet_aton(text))
        except (OSError, ValueError, UnicodeError):
            return None
    return None


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, where there is one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
