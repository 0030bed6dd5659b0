"""Rules for names and quantities that a user types; `kubectl --dry-run=server` checks the rest of a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from anabatic.config.sections.kubernetes import Kubernetes, parse_pairs
from anabatic.core.errors import ConfigError

_MAX_FAULTS = 3
"""Most faults that a message names."""


@dataclass(frozen=True)
class NameRule:
    """A text of at most `max_chars` characters that matches a pattern in full."""

    description: str
    pattern: str
    max_chars: int = 253

    def find_fault(self, text: str) -> str:
        """Return why the text is refused; empty: it is not."""
        if len(text) > self.max_chars:
            return f"has {len(text)} characters, at most {self.max_chars} are allowed"
        return "" if re.fullmatch(self.pattern, text) else f"is {text!r}, not {self.description}"


_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PREFIX = rf"(?=[^/]{{1,253}}/){_SUBDOMAIN}/"
JOB_NAME = NameRule(
    "a name of small letters, digits and dashes that begins with a letter and ends with a letter or digit",
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    50,
)
"""Operators name services (RFC 1035) and pods (63 characters with `-worker-999`) after the job."""
DNS_LABEL = NameRule("a name of small letters, digits and dashes", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)
OBJECT_NAME = NameRule("a name of small letters, digits, dashes and dots", _SUBDOMAIN)
QUEUE_NAME = NameRule(OBJECT_NAME.description, _SUBDOMAIN, 63)
"""Kueue takes the name from a label's value."""
LABEL_KEY = NameRule("a label's key", rf"({_PREFIX})?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", 317)
LABEL_VALUE = NameRule("a label's value", r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
RESOURCE_NAME = NameRule(
    "a resource such as huawei.com/Ascend910, with its domain",
    rf"{_PREFIX}[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
    317,
)
"""A resource of a device plugin (kubernetes.io, "Resource Management": extended ones have a domain)."""
QUANTITY = NameRule(
    "a quantity such as 64Gi or 500m", r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][0-9]+)?", 30
)
VARIABLE_NAME = NameRule("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_KEY = NameRule("a secret and its key", rf"{_SUBDOMAIN}/[-._A-Za-z0-9]+", 507)
IMAGE_NAME = NameRule("an image", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", 500)
ABSOLUTE_PATH = NameRule("an absolute path without a colon", r"/[^:\0\n]*", 4096)

_TEXT_RULES = {
    "name": JOB_NAME, "namespace": DNS_LABEL, "image": IMAGE_NAME, "cpu": QUANTITY, "memory": QUANTITY,
    "shm": QUANTITY, "resource": RESOURCE_NAME, "rdma": RESOURCE_NAME, "queue": QUEUE_NAME, "priority": OBJECT_NAME,
    "workdir": ABSOLUTE_PATH, "pull_secret": OBJECT_NAME, "env_from": OBJECT_NAME,
}  # fmt: skip
"""Setting -> rule of its text, or of each of its texts; an empty text is not given."""
_PAIR_RULES = {
    "env": (VARIABLE_NAME, None),
    "secret_env": (VARIABLE_NAME, SECRET_KEY),
    "node_selector": (LABEL_KEY, LABEL_VALUE),
    "label": (LABEL_KEY, LABEL_VALUE),
    "annotation": (LABEL_KEY, None),
}
"""Setting of KEY=VALUE -> rules of key and value; None: any value."""


def check_names(settings: Kubernetes) -> None:
    """Check the names and quantities of a job.

    Raises:
        ConfigError: Kubernetes would refuse one; the message names the option.
    """
    faults = list(_find_faults(settings))
    if faults:
        more = f", and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise ConfigError(
            f"Kubernetes would not take the job: {'; '.join(faults[:_MAX_FAULTS])}{more}",
            "change the option, see `anabatic launch k8s --help`; the rules of names are on kubernetes.io, Object Names"
            " and IDs",
        )


def _find_faults(settings: Kubernetes) -> Iterator[str]:
    for name, rule in _TEXT_RULES.items():
        value = getattr(settings, name)
        for text in value if isinstance(value, list) else [value] if value else []:
            yield from _describe_fault(name, "", rule, text)
    for name, (key_rule, value_rule) in _PAIR_RULES.items():
        for key, value in parse_pairs(getattr(settings, name)):
            yield from _describe_fault(name, ": the key", key_rule, key)
            yield from _describe_fault(name, f" {key!r}", value_rule, value) if value_rule else ()
    for text in settings.volume:
        if text.startswith("pvc:"):
            yield from _describe_fault("volume", ": the claim", OBJECT_NAME, text.split(":")[1])


def _describe_fault(name: str, part: str, rule: NameRule, text: str) -> Iterator[str]:
    if fault := rule.find_fault(text):
        yield f"--{name.replace('_', '-')}{part} {fault}"
