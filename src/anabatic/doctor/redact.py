"""What must not leave a machine: tokens, keys, passwords, names of people."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from typing import Any

GONE = "[removed]"
_WORD = (
    r"token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|auth|credential|cookie|"
    r"session[_-]?id"
)
SECRET_NAME = re.compile(rf"(?i)(?<![a-z])(?:{_WORD}|pat|key|license|pwd|jwt|bearer)s?(?![a-z])")
"""Names of variables and keys whose value is never shown."""
_PROSE = "is|for|of|was|not|and|or|required|to|in|file|has|cannot|does"
"""What follows the word password where none is told."""
_SITES = "hf|sk|pk|ghp|gho|ghs|glpat|github_pat|xox[a-z]|AKIA|ASIA|AIza|dckr_pat"
"""Start of the tokens of well-known sites."""
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*(?:PRIVATE KEY|CERTIFICATE)-----.*?(?:-----END [A-Z ]*-----|\Z)", re.S), GONE),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^/\s@]{1,400}@"), rf"\1{GONE}@"),
    (re.compile(rf"(?i)((?:{_WORD})[\w.-]{{0,80}}[\"']?\s{{0,20}}[:=]\s{{0,20}})(\"[^\"]*\"|'[^']*'|bearer\s+\S+|basic\s+\S+|[^\s,;&\"']+)"),
     rf"\1{GONE}"),
    (re.compile(rf"(?i)((?<![\w-])--?[\w-]{{0,80}}(?:{_WORD})[\w-]{{0,80}}\s{{1,20}})(?!-)\S+"), rf"\1{GONE}"),
    (re.compile(rf"(?i)\b(pass(?:word|wd|phrase)(?: +is)? +)(?!(?:{_PROSE})\b)[^\s:=]+"), rf"\1{GONE}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {GONE}"),
    (re.compile(rf"\b(?:{_SITES})[_-]?[A-Za-z0-9_-]{{16,}}"), GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]*"), GONE),
    (re.compile(r"\b[A-Fa-f0-9]{32,}\b"), GONE),
    (re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"), GONE),
)  # fmt: skip
"""Forms of secrets: PEM blocks, URLs with a password, NAME=value, options, a password behind the word, headers, tokens
of known sites, JWT, hashes, mail addresses. Repetitions are bounded: a megabyte without a blank must not take hours."""
_HOME = re.compile(r"(/(?:home|Users|data/home|mnt/home)/)(?!USER\b)[^/\s:\"',;]+")
_KEPT = re.compile(
    r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET|CUDA|NVIDIA|MASTER_|"
    r"RANK$|LOCAL_RANK$|WORLD_SIZE$|LD_|PATH$|PYTHON|CONDA_PREFIX$|VIRTUAL_ENV$|HOME$|LANG|LC_|TASK_QUEUE|PER_STREAM|"
    r"CPU_AFFINITY|MULTI_STREAM|OOM_|INF_NAN|COMBINED|STREAMS_|AUTO_USE|FORCE_OVERFLOW|TOOLCHAIN|TMPDIR$|container$|"
    r"SLURM_(NNODES|NTASKS|PROCID|LOCALID)|HOST_CACHE|ANABATIC|MKL_|OPENBLAS|GOMP|KMP|MALLOC)"
)
"""Start of the names of variables that a supporter needs; of all others only the name leaves the machine."""
_COMMON = {"root", "user", "admin", "ubuntu", "nobody", "daemon", "home", "USER"}
"""Names that say nothing about a person."""


def people(env: Mapping[str, str]) -> set[str]:
    """Return the names of the user and of everybody whose home a variable names."""
    names = {env.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a container whose uid has no name
        names.add("")
    home = env.get("HOME", "").rstrip("/").rpartition("/")[2]
    return {name for name in {*names, home} if len(name) > 2 and name not in _COMMON}


def text(content: str, names: set[str]) -> str:
    """Return text without secrets, home folders and the `names` of people."""
    for pattern, instead in _RULES:
        content = pattern.sub(instead, content)
    content = _HOME.sub(r"\1USER", content)
    for name in sorted(names, key=len, reverse=True):
        content = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "USER", content)
    return content


def environ(env: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """Return the variables that may leave: those of this stack with their values, of all others the names."""
    kept = {}
    for name, value in env.items():
        open_to_all = _KEPT.match(name) and not SECRET_NAME.search(name)
        kept[name] = text(value, names) if open_to_all else GONE
    return kept


def values(told: Any, names: set[str]) -> Any:
    """Return a JSON value with every text in it redacted."""
    if isinstance(told, str):
        return text(told, names)
    if isinstance(told, dict):
        return {
            text(str(key), names): GONE
            if SECRET_NAME.search(str(key)) and isinstance(item, str)
            else values(item, names)
            for key, item in told.items()
        }
    return [values(item, names) for item in told] if isinstance(told, list) else told
