"""Files of hosts: what MPI, DeepSpeed and ssh write, and what nobody understands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.launch.hosts import hostfile
from anabatic.launch.hosts.hostfile import HostEntry


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", HostEntry("node1")),
        ("node-1.lab.example slots=8", HostEntry("node-1.lab.example", slots=8)),
        ("node1 slots=8 max_slots=4", HostEntry("node1", slots=4)),
        ("node1:8", HostEntry("node1", slots=8)),
        ("me@10.0.0.2 port=2222 slots=4  # the old one", HostEntry("10.0.0.2", "me", 2222, 4)),
        ("ssh://me@node1:2222/ slots=2", HostEntry("node1", "me", 2222, 2)),
        ("ssh://node1", HostEntry("node1")),
        ("::1", HostEntry("::1")),
        ("me@[fe80::1]:4", HostEntry("fe80::1", "me", slots=4)),
        ("fe80::1%eth0 slots=1", HostEntry("fe80::1%eth0", slots=1)),
        ("ssh://[2001:db8::1]:2222", HostEntry("2001:db8::1", port=2222)),
    ],
)
def test_lines(line: str, host: HostEntry) -> None:
    (found,) = hostfile.parse_hostfile(f"\n# machines\n{line}\n", "x")
    assert found == HostEntry(host.name, host.user, host.port, host.slots, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "x names no host"),
        ("a\nb\nA slots=3", "x:3: A stands in line 1 already"),
        ("a:2222", "x:1: 2222 processes on a, which takes 1 to 256"),
        ("a slots=0", "x:1: 0 processes on a"),
        ("a slots=many", 'x:1: "many" in "slots=many" is no whole number'),
        ("a slots", 'x:1: "slots" is not understood'),
        ("a gpus=8", 'x:1: "gpus=8" is not understood'),
        ("a port=0", "x:1: port 0"),
        ("ssh://a:1 port=2", "names a port, and port= another"),
        ("-oProxyCommand=touch", 'x:1: "-oProxyCommand=touch" is no name'),
        ("-l@a", 'x:1: "-l" is no name of a user'),
        ("[::1", 'x:1: "[::1" is no address in brackets'),
        ("[node]:3", "is no address in brackets"),
        ("1:2:3", '"1:2:3" is no name and no address'),
        ("$(id)", "is no name and no address"),
        ("a" * 254, "is no name and no address"),
        ("\n".join(f"node{number}" for number in range(10000)), "x names 10000 hosts, and a job takes 9999"),
    ],
)
def test_what_is_not_understood(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        hostfile.parse_hostfile(text, "x")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        hostfile.read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        hostfile.read_hostfile(tmp_path / "binary")
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        hostfile.read_hostfile(Path("/dev/zero"))
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2\r\n")
    assert [(host.name, host.slots) for host in hostfile.read_hostfile(tmp_path / "windows")] == [
        ("node1", 2),
        ("node2", None),
    ]


names = st.sampled_from(["node1", "Node-2", "a", "10.0.0.7", "x.lab.example", "n_1"])
ports = st.none() | st.integers(1, 65535)
machines = st.lists(
    st.builds(
        HostEntry, names | st.just("fe80::12"), st.sampled_from(["", "me"]), ports, st.none() | st.integers(1, 256)
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda host: (host.name.lower(), host.port),
)


@given(machines)
def test_what_is_written_is_read(written: list[HostEntry]) -> None:
    def line(host: HostEntry) -> str:
        port = f" port={host.port}" if host.port else ""
        slots = f" slots={host.slots}" if host.slots else ""
        return f"{host.user}@{host.name}{port}{slots}" if host.user else f"{host.name}{port}{slots}"

    found = hostfile.parse_hostfile("\n".join(map(line, written)), "x")
    assert [(h.name, h.user, h.port, h.slots) for h in found] == [(h.name, h.user, h.port, h.slots) for h in written]


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        for host in hostfile.parse_hostfile(text, "x"):
            assert not host.name.startswith("-") and not host.user.startswith("-") and " " not in host.name
    except ConfigError as error:
        assert re.match(r"x:\d+: |x names no host", str(error)), error
