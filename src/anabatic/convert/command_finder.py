"""Which commands of a script belong to a program that is known, and their arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from anabatic.convert import peer_tables, shell_parser
from anabatic.core import log
from anabatic.core.errors import ConfigError

SHARED_NAMES = {"swift": "transformers", "llamafactory": "transformers", "deepspeed": "transformers", "nanochat": ""}
"""Program -> whose names it has beside its own."""
_WRAPPERS = frozenset(["nohup", "exec", "sudo", "env", "stdbuf", "setsid", "$"])
_JOB_STARTERS = frozenset(
    (
        "srun",
        "mpirun",
        "mpiexec",
        "numactl",
        "taskset",
        "timeout",
        "nice",
        "singularity",
        "apptainer",
        "docker",
        "podman",
    )
    + ("conda", "ssh")
)
_MAX_NESTED = 4
"""Scripts inside of words of scripts (`bash -c "..."`) that are looked into."""
_STARTED_PROGRAM = re.compile(r"python[0-9.]*|torchrun|deepspeed|accelerate|swift|llamafactory-cli|lmf|bash|sh")
"""What is looked for behind the options of those."""
_OPTION_START = re.compile(r"--?[A-Za-z]")
_QUOTES = "\u201c\u201d\u2018\u2019"
"""Quotation marks of print, which a shell takes for letters."""
_DASHES = "\u2013\u2014\u2212"
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_VALUELESS_OPTIONS = frozenset(
    ("standalone", "no_python", "use_env", "multi_gpu", "multi_npu", "no_local_rank", "m", "module", "use_deepspeed")
    + ("use_fsdp", "tee", "cpu", "use_megatron_lm", "use_parallelism_config", "debug", "quiet", "tpu")
    + ("enable_cpu_affinity", "downcast_bf16")
)
"""Options of launchers that stand without a value."""


@dataclass(frozen=True)
class PeerOption:
    """One argument of a program."""

    name: str
    """As tables have it: without hyphens in front, `_` inside."""
    value: Any
    """A text, a list of texts, True for an option that stands alone; of any type from a YAML or JSON file."""
    original_text: str
    """As it is written there."""


@dataclass
class PeerCommand:
    """One command that belongs to a known program."""

    peer: str
    peer_name: str
    """As its table calls it."""
    row: peer_tables.MappingRow
    line: int
    command_line: str
    options: list[PeerOption] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    """Configuration files that it names."""
    is_machine_written: bool = False
    """By a program, as args.json is: keys that are not known are no slips of a pen."""


@dataclass
class ScriptCommands:
    """What a script holds."""

    calls: list[PeerCommand] = field(default_factory=list)
    unknown_commands: list[str] = field(default_factory=list)
    """First words of the commands that belong to nothing known."""


def find_commands(text: str, peer: str) -> ScriptCommands:
    """Return the commands of `peer` in a script.

    Raises:
        ConfigError: the script cannot be read, or a line lost its connection to the one before.
    """
    found = ScriptCommands()
    for simple in _iter_commands(text):
        call = _parse_command(simple, peer)
        if call is not None:
            found.calls.append(call)
        else:
            found.unknown_commands.append(_command_name(simple.words, peer))
    return found


def _iter_commands(text: str, depth: int = 0) -> Iterator[shell_parser.SimpleCommand]:
    """Yield the commands of a script, and in place of `bash -c TEXT` and `eval TEXT` those of the text."""
    for simple in shell_parser.parse_script(text):
        inner = _nested_script(list(simple.words)) if depth < _MAX_NESTED else ""
        try:
            nested = list(_iter_commands(inner, depth + 1)) if inner else [simple]
        except ConfigError:  # not written for this shell, such as a program of another language
            log.debug(f"line {simple.line}: what is handed to a shell cannot be read")
            nested = [simple]
        for one in nested:
            yield shell_parser.SimpleCommand(one.words, {**simple.variables, **one.variables}, simple.line)


def _nested_script(words: list[str]) -> str:
    """Return the text that a command hands to a shell; empty: it hands over none."""
    _, words = _strip_wrappers(words)
    name = PurePosixPath(words[0]).name if words else ""
    if name == "eval":
        return " ".join(words[1:])
    if name not in ("bash", "sh"):
        return ""
    for at, word in enumerate(words[1:-1], start=1):
        if re.fullmatch(r"-[a-z]*c", word):
            return words[at + 1]
        if not word.startswith("-"):
            break
    return ""


def _command_name(words: tuple[str, ...] | list[str], peer: str) -> str:
    """Return what a command is called: the module behind python, the word behind a program that is known."""
    program, rest = _split_program(list(words))
    firsts = {
        name.split()[0]
        for row in peer_tables.load_tables(peer).tables["commands"]
        for name in row.theirs
        if " " in name
    }
    command_name = f"{program} {rest[0]}" if program in firsts and rest and not rest[0].startswith("-") else program
    return command_name or words[0]


def find_owner(word: str, text: str) -> str:
    """Return the program whose command stands in `text`, other than `word`; empty if there is none."""
    for peer in SHARED_NAMES:
        if peer not in (word, "deepspeed") and find_commands(text, peer).calls:
            return peer
    return ""


def _parse_command(simple: shell_parser.SimpleCommand, peer: str) -> PeerCommand | None:
    words = list(simple.words)
    if words[0].startswith("--"):
        raise ConfigError(
            f"line {simple.line} begins with {words[0]}, which is no command",
            "the line before it must end in \\ without a space after it",
        )
    own, words = _strip_wrappers(words)
    launch: list[PeerOption] = []
    program, words = _split_program(words)
    while program in _LAUNCHERS:
        if program == "accelerate" and words[:1] == ["launch"]:
            words = words[1:]
        given, words = _split_launch_options(words)
        launch += [PeerOption(one.name, one.value, f"{program} {one.original_text}") for one in given]
        program, words = _split_program(words)
    row, name, words = _find_command_row(program, words, peer)
    if row is None:
        return None
    variables = [PeerOption(key, value, f"{key}={value}") for key, value in {**simple.variables, **own}.items()]
    call = PeerCommand(peer, name, row, simple.line, shlex.join(simple.words), [*variables, *launch])
    positional = []
    for option in _iter_options(words[1:] if words[:1] == ["--"] else words):
        if option.name:
            call.options.append(option)
        else:
            positional.append(option.value)
    for word in positional:
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key):
            call.options.append(PeerOption(key, value, word))
        elif word.endswith((".yaml", ".yml", ".json")):
            call.config_files.append(word)
        else:
            call.options.append(PeerOption("", word, word))
    return None if peer == "deepspeed" and not launch and not _has_training_options(call) else call


def _has_training_options(call: PeerCommand) -> bool:
    """True for a script that no launcher starts, if it has an argument that only trainings have."""
    rows = (row for file in ("transformers", "deepspeed") for row in peer_tables.load_tables(file).all_rows())
    known = {name for row in rows if row.ours for name in row.theirs}
    return any(option.name in known for option in call.options)


def _strip_wrappers(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that `env` and its like set, and the command that they and srun, mpirun, ... start."""
    variables: dict[str, str] = {}
    while words and (words[0] in _WRAPPERS or re.match(r"[A-Za-z_]\w*=", words[0])):
        name, equals, value = words[0].partition("=")
        variables |= {name: value} if equals else {}
        words = words[1:]
    if words and PurePosixPath(words[0]).name in _JOB_STARTERS:
        at = next((at for at, word in enumerate(words) if _STARTED_PROGRAM.fullmatch(PurePosixPath(word).name)), 0)
        words = words[at:]
    return variables, words


def _split_program(words: list[str]) -> tuple[str, list[str]]:
    """Return the program, module or script that runs, and its words."""
    if not words:
        return "", []
    name, rest = words[0], words[1:]
    if re.fullmatch(r"python[0-9.]*", PurePosixPath(name).name):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
        if rest[:1] == ["-m"]:
            rest = rest[1:]
        name, rest = (rest[0], rest[1:]) if rest else ("", [])
    elif name in ("-m", "bash", "sh") and rest:
        name, rest = rest[0], rest[1:]
    elif name in ("uv", "poetry") and rest[:1] == ["run"]:
        return _split_program(rest[1:])
    base = PurePosixPath(name).name
    return _LAUNCHER_MODULES.get(name, base if base in _LAUNCHERS else name), rest


def _split_launch_options(words: list[str]) -> tuple[list[PeerOption], list[str]]:
    """Return the options of a launcher, and what it launches."""
    given: list[PeerOption] = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module", "--"):
        name, equals, value = words[0].lstrip("-").partition("=")
        name, shown, words = name.replace("-", "_"), words[0], words[1:]
        if not equals and name not in _VALUELESS_OPTIONS and words and not _OPTION_START.match(words[0]):
            value, shown, words = words[0], f"{shown} {words[0]}", words[1:]
        given.append(PeerOption(name, value or True, shown))
    if words[:1] == ["--module"]:
        words = ["-m", *words[1:]]
    return given, words[1:] if words[:1] == ["--"] else words


def _find_command_row(
    program: str, words: list[str], peer: str
) -> tuple[peer_tables.MappingRow | None, str, list[str]]:
    """Return the row of a command, its name, and its words without those that the name has."""
    path = PurePosixPath(program)
    dotted = re.sub(r"/", ".", re.sub(r"^(\./|/)+", "", program)).removesuffix(".py")
    names = [dotted, path.name, path.stem]
    rows = peer_tables.load_tables(peer).tables["commands"]
    if words:
        pair = f"{path.name} {words[0]}"
        for row in rows:
            if pair in row.theirs:
                return row, pair, words[1:]
    for name in names:
        for row in rows:
            if name in row.theirs or any(dotted.endswith(f".{one}") for one in row.theirs):
                return row, name, words
    script = path.suffix in (".py",) or (program and "." in program and "/" not in program)
    if script and peer == "deepspeed":
        return next(row for row in rows if "*.py" in row.theirs), path.name, words
    return None, "", words


def _require_quotes(word: str) -> None:
    """Refuse a word that stands between quotation marks of print: the shell has not taken them away."""
    text = word.partition("=")[2] if word.startswith("-") else word
    between = text[-1:] in _QUOTES or not any(mark in text[1:] for mark in _QUOTES)
    if text[:1] and text[0] in _QUOTES and " " not in text and between:
        raise ConfigError(f"{text} begins with a quotation mark of print", "write \" or ' in its place")


def _iter_options(words: list[str]) -> Iterator[PeerOption]:
    """Yield the options among words as argparse sees them; words before the first one have no name."""
    for word in words:
        _require_quotes(word)
    at = 0
    while at < len(words):
        word = words[at]
        if word[:1] and word[0] in _DASHES:
            raise ConfigError(
                f"{word} begins with a long dash, not with two hyphens", f"write --{word.lstrip(_DASHES)}"
            )
        at += 1
        if word != word.strip() and _OPTION_START.match(word.strip()):
            raise ConfigError(
                f'"{word}" begins with a space', "the line before ends in \\ and a space: remove the space"
            )
        if not _OPTION_START.match(word):
            yield PeerOption("", word, word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and not _OPTION_START.match(words[at]) and words[at] != "--":
            values.append(words[at])
            at += 1
        original = " ".join([word, *values]) if not equals else word
        yield PeerOption(name.replace("-", "_"), values if len(values) > 1 else values[0] if values else True, original)
