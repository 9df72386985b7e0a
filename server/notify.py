"""What systemd is told, where it asked (NOTIFY_SOCKET): ready, stopping, and the stage of a long start.

The protocol is one datagram (man 3 sd_notify); a start of an hour shows in `systemctl status` while it lasts.
"""

from __future__ import annotations

import socket

from drafter.settings import read_settings


def notify(*lines: str) -> None:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…`; nothing where nobody asked. Raises OSError where systemd is gone."""
    address = read_settings().notify_socket
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode(), address)
