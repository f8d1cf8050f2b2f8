"""Messages to systemd: a service of `Type=notify` reports when it is ready, reloads and stops."""

import os
import socket
import time


def notify(**fields: str) -> bool:
    """Send fields such as `READY="1"` to the service manager; return False if none has started this process.

    A manager that does not answer never stops the service: the message is dropped.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    message = "\n".join(f"{name}={value}" for name, value in fields.items()).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.connect(address)
            channel.send(message)
    except OSError:
        return False
    return True


def monotonic_microseconds() -> str:
    """Return the time that `RELOADING=1` must be sent with."""
    return str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def watchdog_seconds() -> float | None:
    """Return the interval in which systemd expects `WATCHDOG=1`; None without `WatchdogSec`."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(microseconds) / 1e6
