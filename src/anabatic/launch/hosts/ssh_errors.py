"""What keeps a machine of `--hosts` from taking part, in words, and what helps. Texts are those of OpenSSH's client."""

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
"""Texts of ssh -> what they mean, what helps."""
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
"""Problem that `remote_agent.py` has found -> what to say, what helps."""


def require_all_ready(machines: Sequence[RemoteMachine], job: RemoteJob) -> None:
    """Raise unless every machine has answered and can take part.

    Raises:
        ConfigError: one cannot for a reason that its owner can fix.
        Failure: one cannot be reached.
    """
    first = (machines[0].answer or {}).get("boot")
    problems = [(machine, *found) for machine in machines if (found := _find_problem(machine, job, first))]
    if problems:
        raise _combine_problems(problems, len(machines))


def _find_problem(machine: RemoteMachine, job: RemoteJob, first: str | None) -> tuple[str, str] | None:
    """Return what keeps a machine from taking part, and what helps; `first` is the kernel that machine 0 runs on."""
    if machine.answer is None:
        return _explain_unreached(machine, job)
    facts = {**machine.answer, "folder": job.folder, "master": job.launch.master_addr, "port": job.launch.master_port}
    facts |= {"python": job.python, "version": __version__}
    found = machine.answer["problem"] or ("loopback" if _is_own_loopback(machine.answer, first) else "")
    if found:
        what, hint = _REMOTE_PROBLEMS[found]
        return what.format(**facts), hint.format(**facts)
    if machine.answer["version"] != __version__:
        there = machine.answer["version"]
        return f"it has anabatic {there}, this machine {__version__}", "install the same version on every machine"
    return None


def _is_own_loopback(answer: Mapping[str, Any], first: str | None) -> bool:
    return bool(answer["loopback"]) and first is not None and answer["boot"] != first


def _explain_unreached(machine: RemoteMachine, job: RemoteJob) -> tuple[str, str]:
    said = " ".join(line.strip() for line in machine.stderr_lines)
    for text, what, hint in _SSH_ERRORS:
        if machine.exit_code == SSH_FAILED_CODE and text in said:
            return what, hint.format(login=machine.host.ssh_destination, name=machine.host.name)
    if machine.exit_code in (126, 127):
        return f"there is no {job.python} on it", "name the Python of the hosts with --hosts-python"
    if machine.exit_code is None:
        return f"it has not answered within {ANSWER_SECONDS:g} s", f"try: ssh {machine.host.ssh_destination} true"
    return (
        f"ssh ends with exit code {machine.exit_code}: {said or 'no message'}",
        f"try: ssh {machine.host.ssh_destination} true",
    )


def _combine_problems(problems: list[tuple[RemoteMachine, str, str]], everybody: int) -> AnabaticError:
    told = [f"{machine.name} (line {machine.host.line_number}): {what}" for machine, what, _ in problems]
    hints = dict.fromkeys(hint for _, _, hint in problems)
    kind = Failure if all(machine.answer is None for machine, _, _ in problems) else ConfigError
    count = f"{len(problems)} of {everybody} machines" if everybody > 1 else "the machine"
    return kind(f"{count} cannot take part: {'; '.join(told)}", "; ".join(list(hints)[:3]))
