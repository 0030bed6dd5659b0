"""Error messages and hints for machines of `--hosts` that cannot take part; patterns match OpenSSH's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabatic import __version__
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.launch.hosts.remote_machine import ANSWER_SECONDS, SSH_FAILED_CODE, RemoteJob, RemoteMachine

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
