"""Find names of machines and people: public addresses, home folders, names of users."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterator

from anabatic.doctor.redaction_text import FoldedText, Span

USER = "USER"
_ADDRESS_SALT = secrets.token_bytes(16)
"""Of this process: the same address has the same word within one bundle, and nobody can try all addresses."""
_CONTEXT_CHARS = 40
_VERSION_CONTEXT = re.compile(
    r"(?i)(?:version|ver|release|driver|firmware|cann|toolkit|v|[=<>~^])[\"']?[\s:=]{0,5}[\"']?$"
)
"""Words before four numbers that are a version."""
_FOUR = r"(?=[0-9])(?<![\w.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}"
_IPV4 = re.compile(
    rf"(?=[0-9])(?:(?<![\w./-])|(?<=//)|(?<=[0-9]-))({_FOUR})(?!\w|\.[0-9]|-(?![0-9]))|"
    r"(?=[0-9])(?<=\bip-)([0-9]{1,3}(?:-[0-9]{1,3}){3})(?![\w-])"
)
"""Four numbers, also behind `//`, as the end of a range, and in the names that clouds give to machines."""
_IPV6 = re.compile(
    r"(?=[0-9A-Fa-f:])(?<![\w:.])(?<!\w\[)(?=[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{2,39}(?:(?<=:)[0-9]{1,3}(?:\.[0-9]{1,3}){3})?(?![\w:]|\.[0-9])"
)
_IPV6_NAME = re.compile(
    r"(?i)(?=[0-9a-f])(?:(?<![\w-])[0-9a-f]{1,4}(?:-[0-9a-f]{0,4}){2,7}(?:s\w{1,9})?\.ipv6-literal\.net\b|"
    r"(?<![\w.])(?:[0-9a-f]\.){16,32}ip6\.arpa\b|(?<![\w.])(?:[0-9]{1,3}\.){4}in-addr\.arpa\b)"
)
"""Addresses as names: of Windows, and of the records that lead from an address to a name."""
_DOCUMENTATION = tuple(
    ipaddress.ip_network(block) for block in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
)
"""Addresses of examples stand for public ones."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_KEPT = r"(?!(?:USER|Public|Shared|Default)(?![\w.-])|\[|\$|\{|<|%[A-Z])"
_NAME = r"[^/\\\s:\"',;|<>()]+"
_LOGIN = r"(?!git@|root@|USER@)[A-Za-z_][\w.-]{1,31}"
_HOMES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?:/|%2[Ff])(?:home[0-9]{{0,3}}|homes|Users|export/home)(?:/|%2[Ff])(?P<name>{_KEPT}{_NAME}?)(?=%2[Ff]|[/\\\s:\"',;|<>()]|$)",
        rf"/(?<![\w/.-]/)(?!(?:api|v[0-9])\b)(?:[\w.-]{{1,40}}/){{0,4}}(?:users?|people|staff|students?)/(?P<name>{_KEPT}{_NAME})",
        rf"\b(?:hdfs|viewfs|webhdfs|nfs|s?ftp|ssh|smb|cifs|afs)://[^/\s]{{0,100}}/(?:users?|homes?)/(?P<name>{_KEPT}{_NAME})",
        r"(?i:[\\/](?:users|documents and settings|homes?)\\{1,4})"
        rf"(?P<name>{_KEPT}[^/\\\r\n:\"',;|<>]{{1,60}}?)(?=\\|[\r\n:\"',;|<>]|$)",
        rf"~(?<![\w/.~-]~)(?P<name>{_KEPT}[A-Za-z_][\w.-]{{1,31}})(?=/)",
        rf"\b(?:cd|ls|cp|mv|cat|du|chown|-C)[ \t]{{1,9}}~(?P<name>{_KEPT}[A-Za-z_][\w.-]{{1,31}})",
        r"\b(?:uid|gid|euid)=[0-9]{1,10}\((?P<name>(?!root\b|USER\b)[\w.-]{1,32})\)",
        r"(?<![\w-])(?:USER|LOGNAME|USERNAME|SUDO_USER)=[\"']?(?P<name>(?!root\b|USER\b|\[)[\w.-]{1,32})",
        rf"(?<![\w/.@-])(?P<name>{_LOGIN})(?=@[\w.-]{{1,63}}(?::[~/]|[ ][~/][^\n]{{0,80}}[$#]))",
        rf"\b(?:ssh|scp|sftp|rsync)[ \t](?:[^\n@|;]{{0,80}}[ \t])?(?P<name>{_LOGIN})(?=@[\w.-]{{1,63}})",
    )
)
"""Homes of every kind, and the other places at which a system writes the name of a user."""


def _find_name(match: re.Match[str]) -> Iterator[Span]:
    yield *match.span("name"), USER


def _name_address(address: str) -> str:
    return f"[address {hashlib.blake2b(address.encode(), key=_ADDRESS_SALT, digest_size=3).hexdigest()}]"


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if any(address in block for block in _DOCUMENTATION if block.version == address.version):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global
    low = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
    if low is None and (address in _NAT64 or int(address) >> 32 == 0):
        low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return _is_public(low) if low is not None and int(low) >> 24 else int(address) >> 125 == 1  # 2000::/3


def _find_ipv4(match: re.Match[str]) -> Iterator[Span]:
    """Keep versions and what is reachable from inside alone; a public address becomes the same word everywhere."""
    parts = [int(part) for part in re.split(r"[.-]", match[match.lastindex or 0])]
    before = match.string[max(0, match.start() - _CONTEXT_CHARS) : match.start()]
    if max(parts) > 255 or max(parts) < 32 or _VERSION_CONTEXT.search(before):
        return
    address = ipaddress.IPv4Address(bytes(parts))
    if _is_public(address):
        yield *match.span(match.lastindex or 0), _name_address(str(address))


def _find_ipv6(match: re.Match[str]) -> Iterator[Span]:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:  # a time, an operator of C++
        return
    if _is_public(address):
        yield *match.span(), _name_address(str(address))


def _find_whole(match: re.Match[str]) -> Iterator[Span]:
    yield *match.span(), _name_address(match[0].lower())


def remove_places(text: FoldedText, names: set[str]) -> None:
    """Remove public addresses, homes and the `names` of people."""
    for pattern, find in ((_IPV6_NAME, _find_whole), (_IPV6, _find_ipv6), (_IPV4, _find_ipv4)):
        text.remove_matches(pattern, find)
    for home in _HOMES:
        text.remove_matches(home, _find_name)
    for name in sorted(names, key=len, reverse=True):
        text.remove_matches(
            re.compile(rf"(?i)(?<![A-Za-z0-9])(?P<name>(?!USER(?-i:)\b){re.escape(name)})(?![A-Za-z0-9])"), _find_name
        )
