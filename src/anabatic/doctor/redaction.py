"""What must not leave a machine: tokens, keys, passwords, names of people."""

from __future__ import annotations

import functools
import getpass
import hashlib
import ipaddress
import math
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from anabatic.doctor import redaction_rules
from anabatic.doctor.redaction_rules import REDACTED

SECRET_NAME = re.compile(
    rf"(?i)(?<![a-z])(?:{redaction_rules.SECRET_WORDS}|pat|key|license|pwd|pass|psk|cred|creds|access|login|jwt|"
    r"bearer|ak|sk)s?(?![a-z])"
)
"""Names of variables and keys whose value is never shown."""
_HOME_FOLDER = re.compile(r"(/(?:home|Users|data/home|mnt/home)/)(?!USER\b)[^/\s:\"',;]+")
_KEPT_VARIABLES = re.compile(
    r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET|CUDA|NVIDIA|MASTER_|"
    r"RANK$|LOCAL_RANK$|WORLD_SIZE$|LD_|PATH$|PYTHON|CONDA_PREFIX$|VIRTUAL_ENV$|HOME$|LANG|LC_|TASK_QUEUE|PER_STREAM|"
    r"CPU_AFFINITY|MULTI_STREAM|OOM_|INF_NAN|COMBINED|STREAMS_|AUTO_USE|FORCE_OVERFLOW|TOOLCHAIN|TMPDIR$|container$|"
    r"SLURM_(NNODES|NTASKS|PROCID|LOCALID)|HOST_CACHE|ANABATIC|MKL_|OPENBLAS|GOMP|KMP|MALLOC)"
)
"""Start of the names of variables that a supporter needs; of all others only the name leaves the machine."""
_COMMON_USER_NAMES = {"root", "user", "admin", "ubuntu", "nobody", "daemon", "home", "USER"}
"""Names that say nothing about a person."""


_CHUNK_CHARS = 4096
"""Characters of a line that are looked at together."""
_ADDRESS_SALT = secrets.token_bytes(16)
"""Of this process: the same address has the same word within one bundle, and nobody can try all addresses."""


def find_person_names(env: Mapping[str, str]) -> set[str]:
    """Return the names of the user and of everybody whose home a variable names."""
    names = {env.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a container whose uid has no name
        names.add("")
    home = env.get("HOME", "").rstrip("/").rpartition("/")[2]
    return {name for name in {*names, home} if len(name) > 2 and name not in _COMMON_USER_NAMES}


def _options_gone(option: re.Pattern[str], line: re.Match[str]) -> str:
    return option.sub(rf"\g<head>{REDACTED}", line[0])


def redact_text(content: str, names: set[str]) -> str:
    """Return text without secrets, public addresses, home folders and the `names` of people."""
    for line, option in redaction_rules.LINES:
        content = line.sub(functools.partial(_options_gone, option), content)
    for pattern, instead in redaction_rules.REDACTION_RULES:
        content = pattern.sub(instead, content)
    content = "".join(_redact_known_patterns(line) for line in content.splitlines(keepends=True))
    content = redaction_rules.SCRAMBLED.sub(_unless_path, content)
    content = redaction_rules.HEX_STRING.sub(_redact_unless_hash, content)
    content = redaction_rules.IPV4_ADDRESS.sub(_redact_unless_private, content)
    content = _HOME_FOLDER.sub(r"\1USER", content)
    for name in sorted(names, key=len, reverse=True):
        content = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "USER", content)
    return content


def _redact_known_patterns(line: str) -> str:
    """Remove what detect-secrets knows, from pieces that are short enough for any pattern."""
    pieces = [line[start : start + _CHUNK_CHARS] for start in range(0, len(line), _CHUNK_CHARS)]
    for pattern in redaction_rules.load_detect_secrets_patterns():
        pieces = [pattern.sub(_redact_groups, piece) for piece in pieces]
    return "".join(pieces)


def _redact_groups(found: re.Match[str]) -> str:
    """Remove the groups of a pattern, or all of it where it has none."""
    whole, start = found[0], found.start()
    spans = [found.span(group) for group in range(1, found.re.groups + 1) if found[group]]
    for first, last in sorted(spans, reverse=True) or [found.span()]:
        whole = whole[: first - start] + REDACTED + whole[last - start :]
    return whole


def _get_text_before(found: re.Match[str]) -> str:
    return found.string[max(0, found.start() - 40) : found.start()]


def _redact_unless_hash(found: re.Match[str]) -> str:
    """Keep the names of commits and contents."""
    return found[0] if redaction_rules.HASH_CONTEXT.search(_get_text_before(found)) else REDACTED


def _unless_path(found: re.Match[str]) -> str:
    """Keep what repeats its letters, as words do: 40 characters drawn at random have 4.8 bits each, paths 4.2."""
    shares = [count / len(found[0]) for count in Counter(found[0]).values()]
    return REDACTED if -sum(share * math.log2(share) for share in shares) > 4.5 else found[0]


def _redact_unless_private(found: re.Match[str]) -> str:
    """Keep versions and what is reachable from inside alone; a public address becomes the same word everywhere."""
    parts = [int(part) for part in found.groups()]
    if max(parts) > 255 or max(parts) < 32 or redaction_rules.VERSION_CONTEXT.search(_get_text_before(found)):
        return found[0]
    if not ipaddress.IPv4Address(found[0]).is_global:
        return found[0]
    return f"[address {hashlib.blake2b(found[0].encode(), key=_ADDRESS_SALT, digest_size=3).hexdigest()}]"


def redact_environ(env: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """Return the variables that may leave: those of this stack with their values, of all others the names."""
    kept = {}
    for name, value in env.items():
        open_to_all = _KEPT_VARIABLES.match(name) and not SECRET_NAME.search(name)
        kept[name] = redact_text(value, names) if open_to_all else REDACTED
    return kept


def redact_values(value: Any, names: set[str]) -> Any:
    """Return a JSON value with every text in it redacted."""
    if isinstance(value, str):
        return redact_text(value, names)
    if isinstance(value, list):
        return _redact_arguments(value, names)
    if not isinstance(value, dict):
        return value
    is_named = any(
        isinstance(value.get(field), str) and SECRET_NAME.search(value[field]) for field in ("name", "key", "id")
    )
    redacted = {}
    for key, item in value.items():
        secret = SECRET_NAME.search(str(key)) is not None and not (is_named and key == "key")
        secret = secret or (is_named and key in ("value", "val", "content", "default"))
        redacted[redact_text(str(key), names)] = _hide_value(item) if secret else redact_values(item, names)
    return redacted


def _hide_value(value: Any) -> Any:
    """Return a value that belongs to the name of a secret: no text of it stays."""
    if isinstance(value, str):
        return REDACTED if value else value
    if isinstance(value, dict):
        return {key: _hide_value(item) for key, item in value.items()}
    return [_hide_value(item) for item in value] if isinstance(value, list) else value


def _redact_arguments(value: list[Any], names: set[str]) -> list[Any]:
    """Return a list; where it is a command line, what follows the option of a secret is removed."""
    redacted = []
    for before, item in zip(["", *value], value, strict=False):
        hidden = False
        if isinstance(item, str) and isinstance(before, str) and before.startswith("-") and not item.startswith("-"):
            hidden = redact_text(f"{value[0]} {before} {shlex.quote(item)}", names).endswith(REDACTED)
        redacted.append(REDACTED if hidden else redact_values(item, names))
    return redacted
