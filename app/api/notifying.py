"""Sends webhooks: tells the end of a job or sweep to its `notify_url`, signed as Standard Webhooks says.

The address comes from whoever may submit jobs, and the server may reach hosts that they may not. So a name is resolved
once, every address that it has must be public or in FLOPWATCH_NOTIFY_NETWORKS, and the connection goes to the checked
address; no proxy, no redirect, and no more than headers of the answer are read.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx
from anyio.to_thread import run_sync
from standardwebhooks import Webhook

from app.errors import STORE_UNAVAILABLE, FieldError, InvalidRequest
from app.settings import Settings
from app.store.queue.webhooks import Delivery, Webhooks

logger = logging.getLogger(__name__)

POLL_S = 2.0
LIMIT_S = 15.0
"""Seconds for a try, from resolving the name to the answer's headers."""
GONE = 410
TRANSLATED = IPv6Network("64:ff9b::/96")
"""NAT64: the last 32 bits are an IPv4 address."""

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]


class Refused(Exception):
    """The address must not be contacted; another try would change nothing."""


def why_refused(address: Address, allowed: Networks) -> str | None:
    """Return why the server sends nothing to this address; None if it does."""
    inner = _inner(address)
    if any(inner in network or address in network for network in allowed):
        return None
    if inner.is_global and not inner.is_multicast and not inner.is_reserved:
        return None
    return f"{address} is no public address, and in none of FLOPWATCH_NOTIFY_NETWORKS"


def check_notify_url(settings: Settings, url: str | None) -> None:
    """Raise InvalidRequest for an address that this server would never tell anything. Names are resolved later."""
    why = None
    if url is None:
        return
    if settings.notify_secret is None:
        why = "Webhooks are off: FLOPWATCH_NOTIFY_SECRET is not set on the server"
    else:
        try:
            why = why_refused(ip_address(urlsplit(url).hostname or ""), settings.notify_networks)
        except ValueError:  # a name
            return
    if why is not None:
        raise InvalidRequest(f"/notify_url: {why}", errors=(FieldError("/notify_url", why),))


def _inner(address: Address) -> Address:
    if isinstance(address, IPv6Address):
        if address in TRANSLATED:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
        return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address
    return address


async def checked_address(host: str, port: int, allowed: Networks) -> str:
    """Resolve a host to one address. Raises Refused if any of its addresses may not be contacted, or OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    for address in addresses:
        if why := why_refused(address, allowed):
            raise Refused(why)
    return str(addresses[0])


async def send(delivery: Delivery, secret: str, allowed: Networks) -> int:
    """Send one message; returns the answer's status. Raises Refused, or what keeps it from being sent."""
    url = urlsplit(delivery.url)
    host = url.hostname or ""
    address = await checked_address(host, url.port or (443 if url.scheme == "https" else 80), allowed)
    body, now = json.dumps(delivery.message, ensure_ascii=False), datetime.now(UTC)
    headers = {
        "Host": url.netloc,
        "Content-Type": "application/json",
        "User-Agent": "flopwatch",
        "webhook-id": delivery.message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(delivery.message_id, now, body),
    }
    there = httpx.URL(delivery.url).copy_with(host=address)
    # The certificate is checked against the name, not the address.
    request: dict[str, Any] = {"headers": headers, "extensions": {"sni_hostname": host}}
    async with (
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=LIMIT_S) as client,
        client.stream("POST", there, content=body.encode(), **request) as answer,
    ):
        return answer.status_code


class Notifier:
    """Delivers what is due, again and again, until its task is cancelled."""

    def __init__(self, webhooks: Webhooks, settings: Settings) -> None:
        self._webhooks = webhooks
        self._secret = settings.notify_secret.get_secret_value() if settings.notify_secret else None
        self._allowed = settings.notify_networks

    async def run(self) -> None:
        if self._secret is None:
            return  # nothing could be signed; another server of the database may have the secret
        while True:
            try:
                while due := await run_sync(self._webhooks.begin):
                    await asyncio.gather(*(self._deliver(one, self._secret) for one in due))
            except STORE_UNAVAILABLE as error:
                logger.warning("webhook delivery postponed: %s", error)
            except Exception:  # no error may end the deliveries
                logger.exception("webhooks cannot be delivered now; they will be tried again")
            await asyncio.sleep(POLL_S)

    async def _deliver(self, delivery: Delivery, secret: str) -> None:
        error, again = None, True
        try:
            async with asyncio.timeout(LIMIT_S):
                status = await send(delivery, secret, self._allowed)
            if not 200 <= status < 300:
                error, again = f"The receiver answered {status}.", status != GONE
                if 300 <= status < 400:
                    error += " Redirects are not followed: give the address that it names."
        except Refused as refused:
            error, again = f"Nothing was sent: {refused}.", False
        except TimeoutError:
            error = f"The receiver did not answer within {LIMIT_S:g} s."
        except (OSError, httpx.HTTPError, httpx.InvalidURL, UnicodeError) as failed:
            error = f"The receiver cannot be reached: {failed or type(failed).__name__}."
        if error is not None:
            what, number = delivery.message["type"], delivery.message["data"]["id"]
            logger.warning("webhook %s of %s, try %s: %s", what, number, delivery.tries + 1, error)
        await run_sync(lambda: self._webhooks.end(delivery, delivered=error is None, again=again))
