"""`anabatic launch --hosts`: run the same job on every machine of a hostfile, through the `ssh` of this machine.

There is one connection per machine. It sends `remote_agent.py`, the recipe and the environment on standard input, so
that `ps` shows neither; then signal numbers. The machines answer first, and nothing starts unless all can take part.
ssh runs in a separate session: Ctrl-C reaches the jobs once, from here. Options of ssh as in ssh_config(5).
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic import __version__
from anabatic.core import relaunch
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.launch.hosts import remote_agent
from anabatic.launch.hosts.hostfile import HostEntry
from anabatic.launch.hosts.remote_machine import ANSWER_SECONDS, SSH_FAILED_CODE, EventQueue, RemoteJob, RemoteMachine

_FORWARDED_PREFIXES = (
    "ANABATIC_",
    "ASCEND_",
    "HCCL_",
    "NCCL_",
    "GLOO_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "NPU_",
    "ACL_",
    "ACLNN_",
    "TASK_QUEUE_",
    "CPU_AFFINITY_",
    "OMP_",
    "MKL_",
    "GOMP_",
)
"""Prefixes of the forwarded variables: they configure collectives, devices and libraries."""
_FORWARDED_NAMES = ("PYTHONSAFEPATH", "NO_COLOR", "LANG", "LC_ALL", "TOOLCHAIN_HOME", "ATB_HOME_PATH")
_INSTALLATION_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Installation paths: forwarded unless another Python is configured for the hosts."""
_PROCESS_VARIABLES = (relaunch.REPORTS_VARIABLE, relaunch.RETRY_VARIABLE)
"""Variables of a single process, never forwarded."""


def collect_remote_environment(extra_names: Sequence[str], include_installation: bool) -> dict[str, str]:
    """Return the environment variables to forward to the other machines.

    Args:
        extra_names: names of further variables.
        include_installation: include the paths of Python and the libraries.

    Raises:
        ConfigError: one of `extra_names` is not set.
    """
    local_environment = relaunch.build_child_environment()
    names = (
        {name for name in local_environment if name.startswith(_FORWARDED_PREFIXES)}
        | set(_FORWARDED_NAMES)
        | set(extra_names)
    )
    names |= set(_INSTALLATION_VARIABLES) if include_installation else set()
    for name in extra_names:
        if name not in local_environment:
            raise ConfigError(f"--hosts-env {name}: there is no such variable here", f"export {name}=... first")
    return {
        name: local_environment[name] for name in sorted(names - set(_PROCESS_VARIABLES)) if name in local_environment
    }


def connect_hosts(hosts: Sequence[HostEntry], job: RemoteJob, events: EventQueue) -> list[RemoteMachine]:
    """Connect to every host and return the machines once all have answered.

    Raises:
        ConfigError: there is no ssh here, or a machine cannot take part for a reason that the user can fix.
        Failure: a machine cannot be reached.
    """
    if shutil.which("ssh") is None:
        raise ConfigError(
            "there is no ssh on the PATH", "install openssh-client, or start the command on every machine"
        )
    agent_source = Path(remote_agent.__file__).read_text(encoding="utf-8")
    name_counts = Counter(host.name for host in hosts)  # two containers on one machine differ only in the port
    names = [host.name if name_counts[host.name] == 1 else f"{host.name} port {host.port}" for host in hosts]
    machines = [RemoteMachine(index, host, names[index], job.python, events) for index, host in enumerate(hosts)]
    try:
        is_multi_host = len(hosts) > 1
        for machine in machines:
            machine.send_line(agent_source)
            request = {"environment": dict(job.environment), "folder": job.folder, "port": job.launch.master_port}
            machine.send_line(
                {**request, "master": job.launch.master_addr if is_multi_host else "", "first": machine.node_rank == 0}
            )
        _await_answers(machines, events)
        require_all_ready(machines, job)
    except BaseException:
        for machine in machines:
            machine.kill_connection()
        raise
    return machines


def _await_answers(machines: list[RemoteMachine], events: EventQueue) -> None:
    """Wait until every machine has answered or ended."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while any(machine.answer is None and machine.exit_code is None for machine in machines):
        try:
            machine, kind, text = events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return
        if kind == "end":
            machine.exit_code = int(text)
        elif kind == "out" and text.startswith(remote_agent.ANSWER_PREFIX):
            machine.answer = json.loads(text[len(remote_agent.ANSWER_PREFIX) :])
        elif kind == "err":
            machine.stderr_lines = [*machine.stderr_lines, text][-20:]


def list_launcher_arguments(job: RemoteJob, host: HostEntry, node_rank: int) -> Iterator[str | None]:
    """Yield the arguments of `anabatic` for one machine; None stands for the recipe file."""
    launch = job.launch
    yield from ("launch", "--nproc", str(job.nproc or host.slots or launch.nproc))
    if launch.is_multi_node:
        fixed = launch.min_nodes == launch.max_nodes
        yield from ("--nnodes", str(launch.max_nodes) if fixed else f"{launch.min_nodes}:{launch.max_nodes}")
        yield from ("--node-rank", str(node_rank)) if fixed or "--check" in job.launcher_options else ()
        yield from ("--master-addr", str(launch.master_addr), "--master-port", str(launch.master_port))
    yield from ("--job-id", launch.job_id, "--max-restarts", str(launch.max_restarts))
    yield from ("--hang-seconds", f"{launch.hang_seconds:g}", "--join-seconds", f"{launch.join_seconds:g}")
    yield from job.launcher_options
    if job.command:
        yield from ("--", *job.command.split(), "-c", None)


def get_host_log_path(job: RemoteJob, node_rank: int) -> Path:
    """Return the log file for the output of a machine, in the run folder on this machine."""
    return Path(job.out or os.curdir) / f"host-{node_rank}.log"


_SSH_ERRORS = (
    ("Permission denied", "it refuses your key", "ssh-copy-id {login}, and start the agent that holds the key"),
    ("Host key verification failed", "its host key is not known here or has changed",
     "log in once by hand, ssh {login}, and compare the key"),
    ("Could not resolve hostname", "its name is not known here", "use its address, or add the name to /etc/hosts"),
    ("Connection refused", "no sshd listens there",
     "start sshd on it, or name its port: {name} port=2222"),
    ("timed out", "it does not answer",
     "is it running, and does its firewall let ssh in? leave it out of the file if not"),
    ("No route to host", "there is no way to it",
     "is it running, and on this network? leave it out of the file if not"),
    ("Network is unreachable", "there is no way to it", "is it running, and on this network?"),
)  # fmt: skip
"""Message of ssh -> its meaning, hint."""
_REMOTE_PROBLEMS = {
    "folder": ("it has no folder {folder} ({detail})", "give the folder of the hosts with --hosts-cwd"),
    "package": (
        "{python} there cannot import anabatic ({detail})",
        "install anabatic {version} there, or name the Python that has it with --hosts-python",
    ),
    "name": (
        "it does not know the name of machine 0, {master} ({detail})",
        "give --master-addr with the address of machine 0 on the network between the machines",
    ),
    "loopback": (
        "{master} is the machine itself there, not machine 0",
        "give --master-addr with the address of machine 0 on the network between the machines",
    ),
    "port": (
        "port {port} cannot be opened there ({detail})",
        "another job may run there: end it, or choose another --master-port",
    ),
}
"""Problem reported by `remote_agent.py` -> message, hint."""


def require_all_ready(machines: Sequence[RemoteMachine], job: RemoteJob) -> None:
    """Raise unless every machine has answered and can take part.

    Raises:
        ConfigError: a machine cannot, for a reason that the user can fix.
        Failure: a machine cannot be reached.
    """
    first_boot_id = (machines[0].answer or {}).get("boot")
    problems = [(machine, *problem) for machine in machines if (problem := _find_problem(machine, job, first_boot_id))]
    if problems:
        raise _combine_problems(problems, len(machines))


def _find_problem(machine: RemoteMachine, job: RemoteJob, first_boot_id: str | None) -> tuple[str, str] | None:
    """Return why a machine cannot take part, and a hint; `first_boot_id` identifies the kernel of machine 0."""
    if machine.answer is None:
        return _explain_unreached(machine, job)
    facts = {**machine.answer, "folder": job.folder, "master": job.launch.master_addr, "port": job.launch.master_port}
    facts |= {"python": job.python, "version": __version__}
    problem = machine.answer["problem"] or ("loopback" if _is_own_loopback(machine.answer, first_boot_id) else "")
    if problem:
        message, hint = _REMOTE_PROBLEMS[problem]
        return message.format(**facts), hint.format(**facts)
    if machine.answer["version"] != __version__:
        remote_version = machine.answer["version"]
        return (
            f"it has anabatic {remote_version}, this machine {__version__}",
            "install the same version on every machine",
        )
    return None


def _is_own_loopback(answer: Mapping[str, Any], first_boot_id: str | None) -> bool:
    return bool(answer["loopback"]) and first_boot_id is not None and answer["boot"] != first_boot_id


def _explain_unreached(machine: RemoteMachine, job: RemoteJob) -> tuple[str, str]:
    stderr = " ".join(line.strip() for line in machine.stderr_lines)
    for text, message, hint in _SSH_ERRORS:
        if machine.exit_code == SSH_FAILED_CODE and text in stderr:
            return message, hint.format(login=machine.host.ssh_destination, name=machine.host.name)
    if machine.exit_code in (126, 127):
        return f"there is no {job.python} on it", "name the Python of the hosts with --hosts-python"
    if machine.exit_code is None:
        return f"it has not answered within {ANSWER_SECONDS:g} s", f"try: ssh {machine.host.ssh_destination} true"
    return (
        f"ssh ends with exit code {machine.exit_code}: {stderr or 'no message'}",
        f"try: ssh {machine.host.ssh_destination} true",
    )


def _combine_problems(problems: list[tuple[RemoteMachine, str, str]], machine_count: int) -> AnabaticError:
    descriptions = [f"{machine.name} (line {machine.host.line_number}): {message}" for machine, message, _ in problems]
    hints = dict.fromkeys(hint for _, _, hint in problems)
    error_type = Failure if all(machine.answer is None for machine, _, _ in problems) else ConfigError
    count = f"{len(problems)} of {machine_count} machines" if machine_count > 1 else "the machine"
    return error_type(f"{count} cannot take part: {'; '.join(descriptions)}", "; ".join(list(hints)[:3]))
