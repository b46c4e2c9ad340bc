"""The address that a front listens on."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from tidegate.errors import InputError


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds an address and does not listen yet; port 0 takes a free one.

    Until it is served, connections are refused instead of left to wait for a model to load. InputError if
    the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol must be named: asyncio turns Nagle's algorithm off only where it is.
        with contextlib.ExitStack() as on_failure:
            sock = on_failure.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            on_failure.pop_all()
    except OSError as error:
        raise unavailable(host, port, error) from None
    sock.setblocking(False)
    return sock


def unavailable(host: str, port: int, error: OSError) -> InputError:
    """Why an address cannot be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} on {host} is taken; stop what listens there or give another --port")
    return InputError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def url_of(sock: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family is socket.AF_INET6 else f"http://{host}:{port}"


def is_exposed(sock: socket.socket) -> bool:
    """Whether others than this machine can reach a bound socket."""
    return not ipaddress.ip_address(sock.getsockname()[0]).is_loopback
