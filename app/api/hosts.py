"""Checks the `Host` that a request names. Without this check another site could point its name at this server (DNS
rebinding): its pages would then have our origin, and their scripts could do everything that a user may."""

import re
from collections.abc import Iterable
from ipaddress import ip_address

from app.errors import MisdirectedRequest

ANY = "*"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?", re.ASCII)


class AllowedHosts:
    """The allowed hosts: loopback names and addresses, the host that the server is bound to, and those of the settings.

    `bound` is FLOPWATCH_HOST; if the server is bound to all addresses, a request may name the address at which it
    arrived. `added` is FLOPWATCH_ALLOWED_HOSTS: names and addresses without ports, `*.example.org` for every name below
    it, `*` for all.
    """

    def __init__(self, bound: str, added: Iterable[str] = ()) -> None:
        names = {_plain(name) for name in (bound, *added)} - {""}
        self._any = ANY in names
        self._names = frozenset(name for name in names if not name.startswith(ANY))
        self._suffixes = tuple(name.removeprefix(ANY) for name in names if name.startswith("*."))
        self._bound_to_all = is_unspecified(bound)

    def check(self, host: str | None, arrived_at: str | None) -> None:
        """Raise MisdirectedRequest unless a request with the header `Host: host` is meant for this server.

        arrived_at: the address of this host that the connection was made to.
        """
        if self._any:
            return
        match = _HOST.fullmatch((host or "").lower())
        name = _plain(match["name"]) if match is not None else ""
        if name in self._names or is_loopback(name) or (self._suffixes and name.endswith(self._suffixes)):
            return
        if self._bound_to_all and arrived_at is not None and name == _plain(arrived_at):
            return
        raise MisdirectedRequest(
            f"This server does not answer for the host {(host or '')[:200]!r}. "
            "If it is meant to, name it in FLOPWATCH_ALLOWED_HOSTS."
        )


def is_loopback(host: str) -> bool:
    """Return True for a loopback name or address; no name server can change that (RFC 6761 for `localhost`)."""
    name = _plain(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Return True if a server bound to this address listens at all addresses."""
    try:
        return not host or ip_address(_plain(host)).is_unspecified
    except ValueError:
        return False


def _plain(host: str) -> str:
    """Normalise a name to lower case without its final dot, an address to one spelling without brackets and zone."""
    name = host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".").partition("%")[0]
    try:
        address = ip_address(name)
    except ValueError:
        return name
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
