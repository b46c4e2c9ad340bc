"""The address that a front listens on."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import resource
import socket

from tidegate.errors import InputError

_MOST_FILES = 2**16  # where the system sets no end
_OWN_FILES = 64  # that a process has open beside its connections
_log = logging.getLogger(__name__)


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


def allow_open_files(wanted: int) -> None:
    """Let the process have as many files open as the system lets it: shells and containers often begin with 1,024.

    The log says so where that is fewer than the `wanted` ones of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if most > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    elif soft != resource.RLIM_INFINITY:
        most = soft
    if most < wanted + _OWN_FILES:
        _log.warning(
            "at most %d files may be open, and all connections together would need %d; raise the limit (ulimit -n) "
            "or lower max_connections", most, wanted + _OWN_FILES,
        )  # fmt: skip
