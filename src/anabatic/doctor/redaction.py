"""Remove what must not leave a machine: tokens, keys, passwords, names of people."""

from __future__ import annotations

import base64
import binascii
import getpass
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from anabatic.doctor import redaction_places, redaction_rules, redaction_tables
from anabatic.doctor.redaction_rules import REDACTED
from anabatic.doctor.redaction_text import FoldedText, Span
from anabatic.doctor.redaction_words import MARKED_WORDS

SECRET_NAME = re.compile(
    rf"(?i)(?<![a-z])(?:{redaction_rules.SECRET_WORDS}|pat|key|license|pwd|pass|psk|cred|creds|access|login|jwt|"
    r"bearer|ak|sk)s?(?![a-z])"
)
"""Names of variables and keys whose value is never shown."""
_KEPT_VARIABLES = re.compile(
    r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET|CUDA|NVIDIA|"
    r"MASTER_(?:ADDR|PORT)$|RANK$|LOCAL_RANK$|WORLD_SIZE$|LD_(?:LIBRARY|PRELOAD|BIND|DEBUG|AUDIT)|PATH$|PYTHON|"
    r"CONDA_PREFIX$|VIRTUAL_ENV$|HOME$|LANG$|LANGUAGE$|LC_|TASK_QUEUE|PER_STREAM|"
    r"CPU_AFFINITY|MULTI_STREAM|OOM_|INF_NAN|COMBINED|STREAMS_|AUTO_USE|FORCE_OVERFLOW|TOOLCHAIN|TMPDIR$|container$|"
    r"SLURM_(NNODES|NTASKS|PROCID|LOCALID)|HOST_CACHE|ANABATIC_|MKL_|OPENBLAS|GOMP|KMP|MALLOC)"
)
"""Start of the names of variables that a supporter needs; of all others only the name leaves the machine."""
_SECRET_VARIABLE = re.compile(
    r"(?i)key|token|secret|pass|pwd|cred|auth|cookie|login|sign|cert|jwt|otp|_pin$|salt|license"
)
"""Parts of the names of variables that are kept without their value, wherever they stand: no variable of this stack
has one."""
_COMMON_USER_NAMES = {"root", "user", "admin", "ubuntu", "nobody", "daemon", "home", "USER"}
"""Names that say nothing about a person."""
_CHUNK_CHARS = 4096
"""Characters that the patterns of detect-secrets see together."""
_BASE64 = re.compile(r"(?<![\w+/=%-])[A-Za-z0-9+/_-]{12,4000}={0,2}(?![\w+/=])")
_PAIR = re.compile(r"[\w.@-]{1,64}:[!-~]{4,400}")
"""A name and its password, as in the header of `Basic`."""
_MAX_BEFORE_CHARS = 200
"""Characters of the program that an argument belongs to."""


def find_person_names(env: Mapping[str, str]) -> set[str]:
    """Return the names of the user and of everybody whose home a variable names."""
    names = {env.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a container whose uid has no name
        names.add("")
    home = env.get("HOME", "").rstrip("/").rpartition("/")[2]
    return {name for name in {*names, home} if len(name) > 2 and name not in _COMMON_USER_NAMES}


def redact_text(content: str, names: set[str]) -> str:
    """Return text without secrets, public addresses, home folders and the `names` of people."""
    text = _fold(content)
    text.replace_spans(_keep_removed(text.text, redaction_tables.find_secret_cells(text.text)))
    for line, option in redaction_rules.LINES:
        text.replace_spans(_keep_removed(text.text, _find_options(line, option, text.text)))
    for pattern in redaction_rules.REDACTION_RULES:
        text.remove_matches(pattern, _find_secret)
    text.replace_spans(_keep_removed(text.text, _find_known_patterns(text.text)))
    text.remove_matches(_BASE64, _find_encoded)
    text.remove_matches(redaction_rules.SCRAMBLED, _find_unless_path)
    text.remove_matches(redaction_rules.HEX_STRING, _find_unless_hash)
    redaction_places.remove_places(text, names)
    return text.restore_text()


def _fold(content: str) -> FoldedText:
    text = FoldedText(content)
    for words, sign in MARKED_WORDS:
        text.mark_words(words, sign)
    return text


def _names_secret(name: str) -> bool:
    return SECRET_NAME.search(_fold(name).text) is not None


def _keep_removed(text: str, spans: Iterator[Span]) -> Iterator[Span]:
    """Yield the spans that are not removed already."""
    for start, end, instead in spans:
        if text[start:end].strip("\"' ,;:=>-\\\n") != REDACTED:
            yield start, end, instead


def _find_secret(found: re.Match[str]) -> Iterator[Span]:
    yield from _keep_removed(found.string, iter([(*found.span("secret"), REDACTED)]))


def _find_options(line: re.Pattern[str], option: re.Pattern[str], text: str) -> Iterator[Span]:
    for program in line.finditer(text):
        for found in option.finditer(text, *program.span()):
            yield *found.span("secret"), REDACTED


def _find_known_patterns(text: str) -> Iterator[Span]:
    """Find what detect-secrets knows, in pieces that are short enough for any pattern."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _CHUNK_CHARS)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        has_key = redaction_rules.KEYED_HINT.search(text, start, end) is not None
        for pattern in redaction_rules.load_detect_secrets_patterns():
            if pattern.pattern.startswith(redaction_rules.KEYED_START) and not has_key:
                continue
            for found in pattern.finditer(text, start, end):
                yield from _find_groups(found)
        start = end


def _find_groups(found: re.Match[str]) -> Iterator[Span]:
    """Yield the groups of a pattern, or all of it where it has none."""
    groups = [found.span(group) for group in range(1, found.re.groups + 1) if found[group]]
    for start, end in groups or [found.span()]:
        yield start, end, REDACTED


def _find_encoded(found: re.Match[str]) -> Iterator[Span]:
    """Find names with their secrets in base64."""
    word = found[0].rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        plain = base64.b64decode(word + "=" * (-len(word) % 4)).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return
    if plain.replace("\n", "").isprintable() and (_PAIR.fullmatch(plain) or SECRET_NAME.search(plain)):
        yield *found.span(), REDACTED


def _get_text_before(found: re.Match[str]) -> str:
    return found.string[max(0, found.start() - 40) : found.start()]


def _find_unless_hash(found: re.Match[str]) -> Iterator[Span]:
    """Keep the names of commits and contents."""
    if not redaction_rules.HASH_CONTEXT.search(_get_text_before(found)):
        yield *found.span(), REDACTED


def _find_unless_path(found: re.Match[str]) -> Iterator[Span]:
    """Keep what repeats its letters, as words do: 40 characters drawn at random have 4.8 bits each, paths 4.2."""
    shares = [count / len(found[0]) for count in Counter(found[0]).values()]
    if -sum(share * math.log2(share) for share in shares) > 4.5:
        yield *found.span(), REDACTED


def redact_environ(env: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """Return the variables that may leave: those of this stack with their values, of all others the names."""
    kept = {}
    for name, value in env.items():
        open_to_all = _KEPT_VARIABLES.match(name) and not (SECRET_NAME.search(name) or _SECRET_VARIABLE.search(name))
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
    is_named = any(isinstance(value.get(field), str) and _names_secret(value[field]) for field in ("name", "key", "id"))
    redacted = {}
    for key, item in value.items():
        secret = _names_secret(str(key)) and not (is_named and key == "key")
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
    program = str(value[0])[-_MAX_BEFORE_CHARS:] if value else ""
    for before, item in zip(["", *value], value, strict=False):
        hidden = False
        if isinstance(item, str) and isinstance(before, str) and before.startswith("-") and not item.startswith("-"):
            hidden = redact_text(f"{program} {before} {shlex.quote(item)}", names).endswith(REDACTED)
        redacted.append(REDACTED if hidden else redact_values(item, names))
    return redacted
