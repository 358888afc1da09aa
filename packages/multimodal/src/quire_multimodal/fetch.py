"""HTTP for media that somebody else names: to public addresses only, bounded in bytes, time and redirects.

A name is resolved once for each hop, its address is checked, and the connection goes to that address: a name server
that answers differently the second time (DNS rebinding) is not asked a second time.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from concurrent.futures import Future

from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError

__all__ = ["fetch_media", "is_public"]

_CHUNK_BYTES = 1 << 18
_REDIRECTS = (301, 302, 303, 307, 308)
_USER_AGENT = "quire"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(each)
    for each in """168.63.129.16/32 192.0.0.0/24 192.88.99.0/24 64:ff9b:1::/48 2001::/23 fec0::/10""".split()
)
"""Clouds' own services (Azure, Oracle), relays of tunnels, local NAT64, Teredo and other tunnels, site-local: what
`ipaddress` takes for global in some versions of Python."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, whatever IPv6 form it hides in."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    if any(ip in network for network in _NOT_PUBLIC if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def fetch_media(url: str, config: MediaConfig) -> bytes:
    """The body at a URL; blocks.

    Raises:
        MediaError: not allowed, not there, too large or too slow.
    """
    deadline = time.monotonic() + config.media_fetch_timeout_s
    for _ in range(config.media_max_redirects + 1):
        try:
            body, url = _fetch_once(url, config, deadline)
        except MediaError:
            raise
        except TimeoutError:
            raise _failed(f"not there within {config.media_fetch_timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= deadline  # the watch has shut the connection down
            reason = (
                f"not there within {config.media_fetch_timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            )
            raise _failed(reason) from None
        if body is not None:
            return body
    raise _failed(f"more than {config.media_max_redirects} redirects")


def _failed(reason: str) -> MediaError:
    return MediaError(f"it cannot be fetched: {reason}", code="media_fetch_failed")


def _fetch_once(url: str, config: MediaConfig, deadline: float) -> tuple[bytes | None, str]:
    """The body, or None and where it is instead."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise MediaError("only http and https URLs are fetched", code="media_not_allowed")
    if config.allowed_media_domains and host not in config.allowed_media_domains:
        raise MediaError(f"media are not fetched from {host} (--allowed-media-domains)", code="media_not_allowed")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with _connect(host, port, config, deadline) as plain:
        watch = threading.Timer(max(deadline - time.monotonic(), 0), _shut_down, [plain])
        watch.daemon = True
        watch.start()
        try:
            connection = http.client.HTTPConnection(host, port)
            secure = parts.scheme == "https"
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
            target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
                f"?{parts.query}" if parts.query else ""
            )
            headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", target, headers=headers)
            with connection.getresponse() as response:
                return _read(response, url, config, deadline)
        finally:
            watch.cancel()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)


def _connect(host: str, port: int, config: MediaConfig, deadline: float) -> socket.socket:
    """A connection to an address that is allowed: the first of the host's that answers."""
    addresses = _resolve(host, port, deadline)
    if not config.allow_private_media_addresses and not all(map(is_public, addresses)):
        raise MediaError(f"media are not fetched from {host}: its address is not public", code="media_not_allowed")
    last: OSError | None = None
    for address in addresses:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        try:
            return socket.create_connection((address, port), timeout=remaining)
        except OSError as error:
            last = error
    raise last or OSError(f"{host} has no address")


def _resolve(host: str, port: int, deadline: float) -> list[str]:
    """Addresses of a host. A name server that does not answer keeps a thread waiting, not us."""
    answer: Future[list[str]] = Future()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="media-names", daemon=True).start()
    return answer.result(timeout=max(deadline - time.monotonic(), 0))


def _read(
    response: http.client.HTTPResponse, url: str, config: MediaConfig, deadline: float
) -> tuple[bytes | None, str]:
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise _failed(f"a redirect ({response.status}) to nowhere")
        return None, urllib.parse.urljoin(url, location)
    if response.status != 200:
        raise _failed(f"the server answers {response.status}")
    pieces, total = [], 0
    while piece := response.read(min(_CHUNK_BYTES, config.media_max_bytes + 1 - total)):
        pieces.append(piece)
        total += len(piece)
        if total > config.media_max_bytes or (response.length or 0) + total > config.media_max_bytes:
            message = f"it has more than the {config.media_max_bytes:,} bytes allowed"
            raise MediaError(message, code="media_too_large")
        if time.monotonic() >= deadline:
            raise TimeoutError
    if time.monotonic() >= deadline:
        raise TimeoutError  # what the watch has cut short looks like the end
    if response.length:
        raise _failed("the body is cut short")
    return b"".join(pieces), url
