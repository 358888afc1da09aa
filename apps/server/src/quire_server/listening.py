"""Where the server listens: an address or a Unix socket, with or without TLS. Knows no HTTP."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.exit_status import CannotListenError

__all__ = ["address_of", "bind", "check_tls", "is_left_behind", "listen"]


@contextlib.contextmanager
def bind(server: ServerConfig) -> Iterator[socket.socket]:
    """Take the address before anything else is started; at the end it is given back.

    Raises:
        ConfigError: it is taken or not ours.
    """
    if server.uds is None:
        with _bind_port(server) as listening:
            yield listening
        return
    path = Path(server.uds)
    with _bind_path(server, path) as listening:
        ours = path.stat().st_ino
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == ours:  # and not that of a server that was started since
                    path.unlink()


def _bind_port(server: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((server.host, server.port))
    except OSError as error:
        listening.close()
        raise _cannot_listen(server, error) from None
    return listening


def _bind_path(server: ServerConfig, path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_left_behind(path):
            path.unlink()
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise _cannot_listen(server, error) from None
    return listening


def is_left_behind(path: Path) -> bool:
    """Whether a socket is there that nobody listens on: the server that made it was killed."""
    if not (path.exists() and stat.S_ISSOCK(path.stat().st_mode)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def listen(listening: socket.socket, server: ServerConfig) -> None:
    """Let clients connect: as late as this, so that nobody takes a server that still loads for one that is ready.

    Raises:
        ConfigError: another server that loaded at the same time was ready first (two may bind, one may listen).
    """
    try:
        listening.listen(2048)
    except OSError as error:
        raise _cannot_listen(server, error) from None


def _cannot_listen(server: ServerConfig, error: OSError) -> CannotListenError:
    words = error.strerror or error
    if server.uds is not None:
        return CannotListenError(
            f"cannot listen on {server.uds!r}: {words}; choose another --uds, or stop the program that uses it",
            field="uds",
        )
    return CannotListenError(
        f"cannot listen on {server.host}:{server.port}: {words}; choose another --port or --host, or stop the program "
        "that uses it",
        field="port",
    )


def address_of(listening: socket.socket, server: ServerConfig) -> str:
    """What clients are to be given, e.g. "http://127.0.0.1:8000"."""
    scheme = "http" if server.ssl_certfile is None else "https"
    if server.uds is not None:
        return f"{scheme}+unix://{server.uds}"
    host, port = listening.getsockname()[:2]
    host_text = f"[{host}]" if ":" in host else host
    return f"{scheme}://{'127.0.0.1' if host == '0.0.0.0' else host_text}:{port}"


def check_tls(server: ServerConfig) -> None:
    """Whether the certificate can be used, before anything is loaded.

    Raises:
        ConfigError: it cannot.
    """
    if server.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"):
            if getattr(server, name):
                raise ConfigError(f"{name} needs a certificate: give ssl_certfile, too", field=name)
        return
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = [name for name in (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs) if name is not None]
        raise ConfigError(f"cannot serve HTTPS with {', '.join(files)}: {error}", field="ssl_certfile") from None
    if server.ssl_ciphers is not None:
        try:
            context.set_ciphers(server.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"ssl_ciphers {server.ssl_ciphers!r} names no cipher of this OpenSSL; see `openssl ciphers`",
                field="ssl_ciphers",
            ) from None
