"""Select the devices and processes to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import parse_whole
from anabatic.monitor.snapshot import DeviceReading, Snapshot, count_devices_per_card, format_device_label


@dataclass(frozen=True)
class DeviceFilter:
    """Empty parts let everything through."""

    devices: tuple[str, ...] = ()
    """`3` is every die of card 3, `3.1` its second one."""
    user: str = ""
    name: str = ""
    """Part of a process's name or command."""

    def filter_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with what passes; with a user or a name, only devices that such a process uses."""
        if not (self.devices or self.user or self.name):
            return snapshot
        counts = count_devices_per_card(snapshot)

        def is_chosen(npu_id: int, chip_id: int | None) -> bool:
            return not self.devices or bool(
                {str(npu_id), format_device_label(npu_id, chip_id, counts)} & set(self.devices)
            )

        processes = [
            each
            for each in snapshot.processes
            if is_chosen(each.npu_id, each.chip_id)
            and self.user in ("", each.user)
            and self.name in f"{each.name or ''} {each.command or ''}"
        ]
        used = {(each.npu_id, each.chip_id) for each in processes}
        devices = [
            each
            for each in snapshot.devices
            if is_chosen(each.npu_id, each.chip_id)
            and (not (self.user or self.name) or (each.npu_id, each.chip_id) in used)
        ]
        return replace(snapshot, devices=_assign_card_power(devices, snapshot), processes=processes)

    def require_devices(self, snapshot: Snapshot) -> None:
        """Check that the devices asked for are here.

        Raises:
            ConfigError: one is not.
        """
        counts = count_devices_per_card(snapshot)
        labels = [format_device_label(each.npu_id, each.chip_id, counts) for each in snapshot.devices]
        known = {*labels, *(str(each.npu_id) for each in snapshot.devices)}
        missing = [word for word in self.devices if word not in known]
        if missing and snapshot.error is None:
            raise ConfigError(f"no device {', '.join(missing)} here", f"this machine shows {', '.join(labels)}")


def _assign_card_power(devices: Sequence[DeviceReading], snapshot: Snapshot) -> list[DeviceReading]:
    """Tell the power of a card on the first of its dies that is shown."""
    watts = {each.npu_id: each.power_w for each in reversed(snapshot.devices) if each.power_w is not None}
    reporting_cards = {each.npu_id for each in devices if each.power_w is not None}
    found = []
    for each in devices:
        told_here = each if each.npu_id in reporting_cards else replace(each, power_w=watts.get(each.npu_id))
        reporting_cards.add(each.npu_id)
        found.append(told_here)
    return found


def parse_device_numbers(given: Sequence[str]) -> tuple[str, ...]:
    """Return the device numbers of `--device 0,1 --device 3.1`.

    Raises:
        ConfigError: a word is no device number.
    """
    found = [word.strip() for text in given for word in text.split(",") if word.strip()]
    for word in found:
        card, _, chip = word.partition(".")
        if parse_whole(card) is None or (chip and parse_whole(chip) is None):
            raise ConfigError(f'--device is "{word}", expected a number', "for example --device 0,1 or --device 3.1")
    return tuple(found)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `PORT` or `HOST:PORT`.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":")
    number = parse_whole(port)
    if number is None or number >= 1 << 16:
        raise ConfigError(f'--prom is "{text}", expected PORT or HOST:PORT', "for example --prom 8082")
    return host.strip("[]") or "127.0.0.1", number
