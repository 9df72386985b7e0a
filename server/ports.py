"""Ports of this machine: which are free, why one cannot be listened on, and how a listener is reached from here."""

from __future__ import annotations

import errno
import secrets
import socket

PORTS = range(20000, 32000)


def port_obstacle(host: str, port: int) -> str | None:
    """Why no server could listen there now, in one sentence with the fix, or None."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {host} is taken: stop what listens there, or use --port."
            if error.errno == errno.EACCES:
                return f"port {port} of {host} needs privileges: use --port with one above 1023."
            return f"{host} is no address of this machine ({error.strerror or error}): use --host with one that is."
    return None


def loopback_of(host: str) -> str:
    """How this machine reaches a server that listens on `host`, as the host of a URL."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return port_obstacle(host, port) is None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment.

    Below the ephemeral range, from which an outgoing connection could take it before the engine listens.
    """
    ports = iter(lambda: PORTS.start + secrets.randbelow(len(PORTS)), None)
    return next(port for port in ports if port_is_free("127.0.0.1", port))
