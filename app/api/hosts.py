"""Which `Host` a request may name: a page of another site whose name was pointed at this server (DNS rebinding) would
otherwise be of the same origin as we are, and its scripts could do all that a user may."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from app.errors import MisdirectedRequest

ANY = "*"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?", re.ASCII)


class AllowedHosts:
    """Loopback names and addresses, the host that the server is bound to, and what the settings add.

    bound: FLOPWATCH_HOST; bound to all addresses, a request may name the one at which it arrived. `added`:
    FLOPWATCH_ALLOWED_HOSTS: names and addresses without ports, `*.example.org` for every name below it, `*` for all.
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
        found = _HOST.fullmatch((host or "").lower())
        name = _plain(found["name"]) if found is not None else ""
        if name in self._names or is_loopback(name) or (self._suffixes and name.endswith(self._suffixes)):
            return
        if self._bound_to_all and arrived_at is not None and name == _plain(arrived_at):
            return
        raise MisdirectedRequest(
            f"This server does not answer for the host {(host or '')[:200]!r}. "
            "If it is meant to, name it in FLOPWATCH_ALLOWED_HOSTS."
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this host alone, whatever a name server says (RFC 6761 for `localhost`)."""
    name = _plain(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Whether a server bound to it listens at all addresses."""
    try:
        return not host or ip_address(_plain(host)).is_unspecified
    except ValueError:
        return False


def _plain(host: str) -> str:
    """A name in lower case without the root's dot; an address in its one spelling, without brackets and zone."""
    name = host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".").partition("%")[0]
    try:
        address = ip_address(name)
    except ValueError:
        return name
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
