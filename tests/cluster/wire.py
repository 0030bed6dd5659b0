"""A cable between two machines whose packets are late, lost, or do not arrive at all.

netem(8) is what one would use; many kernels are built without it. Each end here is a TUN device
(https://docs.kernel.org/networking/tuntap.html) in the machine's network namespace; a thread carries the packets.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass

# include/uapi/linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST_PACKET = 65536


@dataclass
class Wire:
    """What the cable does to packets, to be changed at any time.

    Attributes:
        delay: seconds that a packet takes, one way.
        loss: share of the packets that are lost.
        is_cut: whether all are.
        carried: packets that have arrived.
        lost: packets that have not.
    """

    delay: float = 0.0
    loss: float = 0.0
    is_cut: bool = False
    carried: int = 0
    lost: int = 0

    def restore(self) -> None:
        """Be a cable without faults."""
        self.delay, self.loss, self.is_cut = 0.0, 0.0, False


class Carrier:
    """The thread that carries packets from either end of a wire to the other.

    Args:
        names: of the two devices, which are made in this network namespace; move them to the machines' namespaces.

    Raises:
        OSError: no TUN device can be made here.
    """

    def __init__(self, wire: Wire, names: tuple[str, str]) -> None:
        self._wire = wire
        self._ends: list[int] = []
        self._wake, self._stop = os.pipe()
        try:
            for name in names:
                self._ends.append(_open_tun(name))
        except OSError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the devices vanish with it."""
        os.close(self._stop)
        self._thread.join()
        for end in (*self._ends, self._wake):
            os.close(end)

    def _close(self) -> None:
        for end in (*self._ends, self._wake, self._stop):
            os.close(end)

    def _carry(self) -> None:
        draw = random.Random(0)
        under_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while True:
            wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], wait)
            if self._wake in ready:
                return
            for end in ready:
                packet = os.read(end, _LARGEST_PACKET)
                count += 1
                if self._wire.is_cut or draw.random() < self._wire.loss:
                    self._wire.lost += 1
                    continue
                other = self._ends[1 - self._ends.index(end)]
                heapq.heappush(under_way, (time.monotonic() + self._wire.delay, count, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # that end is not up
                    os.write(other, packet)
                    self._wire.carried += 1


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device
