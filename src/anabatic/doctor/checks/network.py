"""Checks of the network: host interfaces that HCCL uses, and the devices' own ports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from anabatic.core.formatting import format_spans, parse_whole
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine

_INTERFACE_VARIABLES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_VIRTUAL_INTERFACE = re.compile(r"lo$|docker|veth|br-|virbr|cali|flannel|cni|tunl|kube")
"""Interfaces that lead to no other machine."""


def get_interface_addresses(machine: TargetMachine) -> dict[str, list[str]]:
    """Interface -> its addresses; what is not of that shape is left out."""
    interfaces = machine.get_fact("interfaces", dict)
    return {str(name): [str(one) for one in rows] for name, rows in interfaces.items() if isinstance(rows, list)}


def list_outward_interfaces(machine: TargetMachine) -> list[str]:
    """Interfaces with an address that may lead to other machines, that of the default route first."""
    table = machine.files.read_text("/proc/net/route") or ""
    rows = [line.split() for line in table.splitlines()[1:]]
    default = [row[0] for row in rows if len(row) > 2 and row[1] == "00000000"]
    names = [
        name for name, rows in get_interface_addresses(machine).items() if rows and not _VIRTUAL_INTERFACE.match(name)
    ]
    return sorted(names, key=lambda name: (name not in default, name))


def match_interfaces(value: str, names: list[str]) -> list[str]:
    """Return the interfaces that a value of HCCL_SOCKET_IFNAME picks: prefixes, `=` exact, `^` all but (hccl_env)."""
    kind = re.match(r"\^?=?", value)
    mark = kind[0] if kind else ""
    words = [word for word in value[len(mark) :].split(",") if word]
    hit = [name for name in names if any(name == word if "=" in mark else name.startswith(word) for word in words)]
    return [name for name in names if name not in hit] if "^" in mark else hit


def check_host_network(machine: TargetMachine) -> Iterator[CheckResult]:
    """The host's interfaces, and the variables that name one."""
    known = get_interface_addresses(machine)
    if not known:
        yield make_result("network.unknown")
        return
    names, wrong = list(known), False
    useful = list_outward_interfaces(machine)
    for name in _INTERFACE_VARIABLES:
        value = machine.env.get(name, "")
        if value and not match_interfaces(value, names):
            wrong = True
            best = useful[0] if useful else "lo"
            yield make_result("network.interface", name=name, value=value[:60], names=", ".join(names), best=best)
    addresses = [one for rows in known.values() for one in rows]
    host_address = machine.env.get("HCCL_IF_IP", "")
    if host_address and host_address not in addresses:
        wrong = True
        yield make_result("network.address", name="HCCL_IF_IP", value=host_address[:60], addresses=", ".join(addresses))
    if not useful:
        yield make_result("network.none")
    elif not wrong:
        yield make_result("network.ok", names=", ".join(f"{name} {known[name][0]}" for name in useful[:4]))


def check_device_addresses(machine: TargetMachine) -> Iterator[CheckResult]:
    """/etc/hccn.conf: the devices' own addresses, needed between machines."""
    if not machine.npu_node_numbers or machine.is_simulated:
        return
    text = machine.files.read_text("/etc/hccn.conf")
    addresses = re.findall(r"^\s*address_\d+\s*=\s*(\S+)", text or "", re.M)
    twice = next((one for one, count in Counter(addresses).items() if count > 1), None)
    if twice:
        yield make_result("hccn.duplicate", address=twice)
    elif addresses:
        yield make_result("hccn.ok", count=len(addresses))
    else:
        yield make_result("hccn.not_mounted" if machine.is_container and text is None else "hccn.none")


def check_device_links(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check the devices' network ports with hccn_tool."""
    if not machine.npu_node_numbers or machine.is_simulated:
        return
    link_facts = machine.get_fact("hccn", dict)
    rows = {
        number: row
        for card, row in link_facts.items()
        if isinstance(row, dict) and (number := parse_whole(str(card))) is not None
    }
    state = {card: str(row.get("link", "")).upper() for card, row in rows.items()}
    down = [card for card, text in state.items() if "DOWN" in text]
    up = [card for card, text in state.items() if "UP" in text and card not in down]
    tls = {
        card: found[1] for card, row in rows.items() if (found := re.search(r"tls switch\[(\d)\]", str(row.get("tls"))))
    }
    if down:
        yield make_result("link.down", which=f"NPU {format_spans(down)}", card=down[0])
    elif up:
        yield make_result("link.ok", count=len(up))
    else:
        yield make_result("link.unknown")
    if len(set(tls.values())) > 1:
        which = ", ".join(f"{card}: {value}" for card, value in tls.items())
        yield make_result("link.tls", which=which, last=max(state))
