"""A Slurm cluster on this machine: slurmctld, munged and three slurmd, which offer NPUs that they do not have.

Two machines have two NPUs of one type, the third has four of another.

The daemons see an `/etc/hosts` of their own, in which the machines have the address of this one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = ("anabatic0", "anabatic1", "anabatic2")
NPUS = ("910b:2", "910b:2", "a3:4")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
_LONGEST_SECONDS = 600.0
_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
"""For a daemon to end after SIGTERM: slurmd waits for its jobs."""
_CONFIG = """
ClusterName=anabatic
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=10
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
FirstJobId={first_job}
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,bf_interval=1
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


class SlurmCluster:
    """A cluster with its files in a folder.

    Args:
        root: empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._host = socket.gethostname().partition(".")[0]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def variables(self) -> dict[str, str]:
        """Environment in which Slurm's programs find this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ANABATIC_"))}
        return {**own, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *words: object, text: str = "", folder: Path | None = None) -> str:
        """Run one of Slurm's programs and return its output.

        Raises:
            RuntimeError: it fails.
        """
        done = subprocess.run(
            list(map(str, words)),
            input=text,
            env=self.variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}\n{self.read_logs()}")
        return done.stdout

    def submit(self, script: str, folder: Path) -> int:
        """Submit a script that writes its log into a folder; return the job's number."""
        return int(self.run("sbatch", "--parsable", text=script, folder=folder).strip())

    def show_job(self, number: int) -> dict[str, str]:
        """Return the fields that Slurm shows of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, number: int, condition: Callable[[dict[str, str]], bool], log: Path) -> dict[str, str]:
        """Wait until something is true of a job.

        Raises:
            TimeoutError: it does not become true within ten minutes.
        """
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not condition(job := self.show_job(number)):
            if time.monotonic() > deadline:
                text = log.read_text() if log.exists() else "no log"
                raise TimeoutError(f"never came: {job}\n{text}\n{self.read_logs()}")
            time.sleep(_POLL_SECONDS)
        return job

    def set_node_down(self, name: str) -> None:
        """Set a machine down, which ends its jobs."""
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")

    def resume_node(self, name: str) -> None:
        """Take a machine into service again that is down, unless Slurm has done so (ReturnToService)."""
        try:
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        except RuntimeError:
            if "DOWN" in self.run("scontrol", "show", "node", name).partition("State=")[2].split()[0]:
                raise

    def read_logs(self) -> str:
        """Return the end of what the daemons have written."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.root.glob("*.log"))

    def start(self) -> None:
        """Start all daemons and wait until all machines are idle.

        Raises:
            TimeoutError: they do not become idle within two minutes.
        """
        self._write_files()
        self.start_daemon("munged", "--foreground", "--force", *self._munge_options())
        self.start_daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self.start_daemon(name, "-D", "-c", "-N", name)
        deadline = time.monotonic() + 120
        while not self._all_idle():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the machines did not become idle\n{self.read_logs()}")
            time.sleep(_POLL_SECONDS)

    def start_daemon(self, name: str, *options: str) -> None:
        """Start munged, slurmctld, or the slurmd of a machine, each with the cluster's `/etc/hosts`."""
        program = "slurmd" if name in NODES else name
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        with open(self.root / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", inside, str(self.root / "hosts"), program, *options],
                env={**self.variables, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def kill_daemon(self, name: str) -> None:
        """kill -9 a daemon; what it has started lives on."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def end(self) -> None:
        """End all jobs and daemons."""
        with suppress(RuntimeError):
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _write_files(self) -> None:
        ports = _free_ports(1 + len(NODES))
        rows = list(zip(NODES, NPUS, ports[1:], strict=True))
        nodes = [_NODE.format(name=name, host=self._host, port=port, gres=gres) for name, gres, port in rows]
        first = secrets.randbelow(19_000) + 1  # a job's port follows from its number: two clusters share this host
        config = _CONFIG.format(host=self._host, ports=ports, root=self.root, first_job=first, nodes="\n".join(nodes))
        (self.root / "slurm.conf").write_text(config)
        types = [(name, *gres.split(":")) for name, gres in zip(NODES, NPUS, strict=True)]
        gres_lines = [f"NodeName={name} Name=npu Type={type_} Count={count}\n" for name, type_, count in types]
        (self.root / "gres.conf").write_text("".join(gres_lines))
        (self.root / "hosts").write_text(f"127.0.0.1 localhost {self._host} {' '.join(NODES)}\n")
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _munge_options(self) -> list[str]:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        return [f"--{option}={self.root / name}" for option, name in {**files, "seed-file": "seed"}.items()]

    def _all_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%t"],
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split() == ["idle"] * len(NODES)


def find_obstacle() -> str:
    """Return why there can be no cluster here; empty when there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    return f"not here: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else ""


@contextmanager
def slurm_cluster(root: Path) -> Iterator[SlurmCluster]:
    """Start a cluster with its files in an empty folder, and end it."""
    cluster = SlurmCluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
