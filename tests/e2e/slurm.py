"""A Slurm cluster on this machine: slurmctld, three slurmd that have NPUs on paper, munged, all of their own.

Two machines have two NPUs of one type, the third has four of another.

The daemons see an `/etc/hosts` of their own, in which the machines have the address of this one.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("anabatic0", "anabatic1", "anabatic2")
NPUS = ("910b:2", "910b:2", "a3:4")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
_LONGEST = 600.0
_CONFIG = """
ClusterName=anabatic
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=90
MinJobAge=3600
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=npu
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 Gres=npu:{gres}"
    " State=UNKNOWN"
)


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs."""

    root: Path

    @property
    def variables(self) -> dict[str, str]:
        """By which its programs find it."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ANABATIC_"))}
        return {**own, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *words: object, text: str = "", folder: Path | None = None) -> str:
        """Run one of Slurm's programs and return what it says."""
        done = subprocess.run(
            list(map(str, words)),
            input=text,
            env=self.variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: str, folder: Path) -> int:
        """Submit a script that writes its log into a folder; return the job's number."""
        return int(self.run("sbatch", "--parsable", text=script, folder=folder).strip())

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, number: int, condition: Callable[[dict[str, str]], bool], log: Path) -> dict[str, str]:
        """Wait until something is true of a job."""
        deadline = time.monotonic() + _LONGEST
        while not condition(job := self.job(number)):
            told = log.read_text() if log.exists() else "no log"
            assert time.monotonic() < deadline, f"never came: {job}\n{told}\n{self.logs()}"
            time.sleep(0.5)
        return job

    def logs(self) -> str:
        """The end of what the daemons have written."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.root.glob("*.log"))


def reason() -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    return f"not here: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else ""


@contextmanager
def cluster(root: Path) -> Iterator[Slurm]:
    """Start a cluster whose files lie in a folder, and end it; skips, with the reason, where there can be none."""
    if why := reason():
        pytest.skip(why)
    host, ports = socket.gethostname().partition(".")[0], _ports(1 + len(NODES))
    rows = zip(NODES, NPUS, ports[1:], strict=True)
    nodes = [_NODE.format(name=name, host=host, port=port, gres=gres) for name, gres, port in rows]
    (root / "slurm.conf").write_text(_CONFIG.format(host=host, ports=ports, root=root, nodes="\n".join(nodes)))
    types = [(name, *gres.split(":")) for name, gres in zip(NODES, NPUS, strict=True)]
    gres_lines = [f"NodeName={name} Name=npu Type={type_} Count={count}\n" for name, type_, count in types]
    (root / "gres.conf").write_text("".join(gres_lines))
    (root / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
    (root / "state").mkdir()
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    slurm = Slurm(root)
    munge = (
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={root}/munge.socket",
        f"--pid-file={root}/munge.pid",
        f"--log-file={root}/munge.log",
        f"--seed-file={root}/seed",
    )
    daemons = [_start(root, slurm.variables, munge)]
    try:
        daemons.append(_start(root, slurm.variables, ("slurmctld", "-D", "-c")))
        daemons += [_start(root, slurm.variables, ("slurmd", "-D", "-c", "-N", name)) for name in NODES]
        _await_nodes(slurm)
        yield slurm
    finally:
        with suppress(AssertionError):
            slurm.run("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(60)


def _start(root: Path, variables: dict[str, str], words: Sequence[str]) -> subprocess.Popen[bytes]:
    inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
    path = f"{variables['PATH']}:/usr/sbin:/sbin"
    with open(root / f"{words[0]}.out", "ab") as out:
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", inside, str(root / "hosts"), *words],
            env={**variables, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _await_nodes(slurm: Slurm) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%t"],
            env=slurm.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.5)
    raise AssertionError(f"the nodes did not come: {done.stdout}{done.stderr}\n{slurm.logs()}")


def _ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
