"""The simulated machine that this process runs on: its counters, and faults that are injected while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anabatic.core.errors import ConfigError, UserError
from anabatic_sim import fault_injection, shared_memory
from anabatic_sim.machine_spec import SEGMENT_VARIABLE
from anabatic_sim.program_name import PROGRAM
from anabatic_sim.shared_memory import SimSegment

_WORKER_COUNT_VARIABLE = "PYTEST_XDIST_WORKER_COUNT"
"""Set by pytest-xdist for its processes, which share the machine."""


def is_simulated() -> bool:
    """Return whether this process runs on a simulated machine."""
    return bool(os.environ.get(SEGMENT_VARIABLE))


@contextmanager
def attach_machine() -> Iterator[LiveMachine]:
    """Yield the machine of this process.

    Raises:
        UserError: there is none.
        Failure: it has ended.
    """
    if not is_simulated():
        raise UserError("this process runs on no simulated NPU", f"start it with `{PROGRAM} -- COMMAND`")
    with shared_memory.attach_segment(os.environ[SEGMENT_VARIABLE]) as segment:
        machine = LiveMachine(segment)
        yield machine
        machine.release()


class LiveMachine:
    """Reads and changes the shared memory of a machine that runs."""

    def __init__(self, segment: SimSegment) -> None:
        self._segment: SimSegment | None = segment
        self._first_row = next(
            (index for index, row in enumerate(segment.fault) if row.kind == 0), fault_injection.MAX_FAULTS
        )
        """Rows before this one are not ours."""
        self._next_row = self._first_row
        self._changed_devices: set[int] = set()

    def release(self) -> None:
        """Let the shared memory go; nothing can be asked from then on."""
        self._segment = None

    @property
    def _live(self) -> SimSegment:
        if self._segment is None:
            raise UserError("the test has ended, and its npu_machine with it", "ask for it inside the test")
        return self._segment

    @property
    def npus(self) -> int:
        """Number of devices."""
        return int(self._live.devices)

    @property
    def chip(self) -> str:
        """As aclrtGetSocName gives it, for example `Ascend910B3`."""
        return str(self._live.soc.decode())

    @property
    def hbm_bytes(self) -> int:
        """Bytes of memory of each device."""
        return int(self._live.device[0].hbm_total)

    def read_counters(self, device: int = 0) -> dict[str, int]:
        """Return what a device has done so far, over all processes: operators, syncs, copies, collectives, memory.

        The difference of two readings is the cost of what is between them.
        """
        row = self._live.device[device]
        return {name: int(getattr(row, name)) for name in shared_memory.COUNTER_NAMES}

    def inject(self, *faults: str) -> None:
        """Add faults `KIND[@DEVICE][#N][=VALUE]`; events count from now on.

        Kinds that last for the process in which they strike (aicore, ecc, and lost on the operator that meets it) are
        for processes that the test starts. For the test's own process mark it with `npu_fault` instead.

        Raises:
            ConfigError: a fault is wrong, or there are too many.
            UserError: other tests run on this machine at the same time.
        """
        if int(os.environ.get(_WORKER_COUNT_VARIABLE, "1")) > 1:
            raise UserError(
                "a fault strikes all tests that run on this machine at the same time",
                'mark the test with @pytest.mark.npu_fault("…"): it gets its own machine; or run without -n',
            )
        parsed = fault_injection.parse_faults(faults, self.npus)
        if self._next_row + len(parsed) > fault_injection.MAX_FAULTS:
            raise ConfigError(f"more than {fault_injection.MAX_FAULTS} faults", "leave some out")
        for fault in parsed:
            kind, device, after, value, factor = fault.to_struct_values()
            row = self._live.fault[self._next_row]
            row.device, row.after, row.value, row.factor, row.struck = device, after, value, factor, 0
            row.kind = kind  # last: the runtime reads a row with a kind
            self._next_row += 1
            self._changed_devices |= set(range(self.npus)) if device < 0 else {device}
            if fault.kind == "health":
                for index in self._changed_devices:
                    self._live.device[index].health = value

    def count_strikes(self) -> int:
        """Return how often the faults injected here have struck."""
        return sum(int(self._live.fault[index].struck) for index in range(self._first_row, self._next_row))

    def remove_faults(self) -> None:
        """End the faults injected here, and repair the devices for processes that start from now on."""
        for index in reversed(range(self._first_row, self._next_row)):
            self._live.fault[index].kind = 0
        self._next_row = self._first_row
        for index in self._changed_devices:
            row = self._live.device[index]
            row.health = row.link_down = row.lost = 0
        self._changed_devices.clear()
