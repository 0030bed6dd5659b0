"""What is typed out of habit from another program, or in the wrong place: what it is here, as a line to copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from anabatic.config import check, commands, yaml_file
from anabatic.config.shared import SEQ_LEN
from anabatic.convert import foreign, recognise
from anabatic.convert.calls import Option
from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean
from anabatic.recipes import length

_CONFIG = ("-c", "--config")
_MOST = 6
"""Words that a message explains."""
_ALIKE = 0.75
"""How near a name must be to be meant: a wrong guess is worse than none."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NO_CONVERTER = ("axolotl", "verl")
"""Programs whose files are said in options: `config from-...` does not read them."""


@dataclass
class Line:
    """A command line of ours, in parts.

    Attributes:
        command: name of the command whose options these are.
        head: words up to it.
        kept: what it understands.
        foreign: options that it does not have.
    """

    command: str
    head: list[str]
    kept: list[str] = field(default_factory=list)
    foreign: list[Option] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def typed(self, more: Sequence[str] = ()) -> str:
        """Return the line with `more` behind it, as it is typed."""
        return shlex.join(["anabatic", *self.head, *self.kept, *more])


def usage(error: CycloptsError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what the words of a line mean that the CLI library does not know; None where nothing tells."""
    if isinstance(error, UnknownOptionError):
        return unknown_option(error, tokens)
    return unused_words(error, tokens) if isinstance(error, UnusedCliTokensError) else None


def unknown_option(error: UnknownOptionError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what an option that does not exist is called here, and the line with all of them put right.

    None for commands that run no job: their options are no settings.
    """
    known = [name for argument in error.argument_collection for name in (*argument.names, *argument.negatives)]
    word = (error.token.keyword or error.token.value).split("=", 1)[0]
    chain = list(error.command_chain or ())
    name = " ".join(chain)
    if name not in commands.COMMANDS or name == "run":
        return None
    line = parse_line(tokens, name, known)
    return explain_line(line, word, known, f"see `anabatic {name} --help`")


def unused_words(error: UnusedCliTokensError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what words without an option mean: settings as KEY=VALUE, or a file; None where nothing tells."""
    name = " ".join(error.command_chain or ())
    words = list(error.unused_tokens or ())
    if name not in commands.COMMANDS or not words:
        return None
    for word in words:
        if recognise.is_recipe(word) and (found := explain_file(word, name, list(tokens))) is not None:
            return found
    if not all(_is_pair(word) for word in words):
        return None
    known = options_of(name)
    line = parse_line(tokens, name, known)
    return explain_line(line, words[0].partition("=")[0], known, f"see `anabatic {name} --help`")


def misplaced(file: str, name: str) -> ConfigError:
    """Return whose a YAML file is that stands where a command of ours takes a model or rows."""
    tokens = [*name.split(), file]
    lost = ConfigError(
        f"{file} does not belong to an option. Did you mean -c {file}?", _with(tokens, file, name, name, ["-c", file])
    )
    return explain_file(file, name, tokens) or lost


def misread(error: ConfigError, tokens: Sequence[str]) -> ConfigError:
    """Return whose file it is that a message is about, or what a key of another program is called here."""
    if list(tokens[:1]) == ["config"]:
        return error  # it is asked about files, and says itself what they lack
    name = _command_of(error, tokens)
    file = next((token for token in tokens if str(error).startswith(f"{token}:") and recognise.is_recipe(token)), None)
    kind = recognise.kind_of(Path(file)) if file is not None else None
    if file is not None and kind is not None and not (kind.program == recognise.OURS and name in kind.commands):
        return explain_file(file, name, list(tokens)) or error
    if not isinstance(error, check.UnknownSetting):
        return error
    key = error.key.rpartition(".")[2].replace("-", "_")
    if not name or name == "run" or not foreign.knows(key):
        return error
    answer = foreign.look_up(name, [Option(key, error.value, error.key)])
    before = str(error).partition(error.key)[0]
    where = check.Where()
    inside = [ours for ours, _ in check.leaves(error.root) if ours.rpartition(".")[2] == key]
    if inside and not any(word.keys for word in answer.words):
        return error
    hint = answer.problem or ", ".join(f"{ours}: {yaml_file.scalar(value)}" for ours, value in answer.settings.items())
    hint = f"write {hint}" if answer.settings and not answer.problem else hint or "take the key out"
    return ConfigError(f"{before}unknown setting {'; '.join(word.said(where) for word in answer.words)}", hint)


def _command_of(error: ConfigError, tokens: Sequence[str]) -> str:
    """Return the command whose settings a message is about; empty where none is."""
    if isinstance(error, check.UnknownSetting):
        return next((row.name for row in commands.COMMANDS.values() if row.job_class() is error.root), "")
    names = (" ".join(tokens[at : at + size]) for at in range(len(tokens)) for size in (2, 1))
    return next((name for name in names if name in commands.COMMANDS), "")


def options_of(name: str) -> list[str]:
    """Return the options of a command."""
    row = commands.get(name)
    keys = [key for key, _ in check.leaves(row.job_class())]
    short = [one for names in row.short.values() for one in names.split()]
    return [*_CONFIG, "--dry-run", *short, *map(check.Flags().option, keys)]


def parse_line(tokens: Sequence[str], name: str, known: Collection[str]) -> Line:
    """Part the words of a line: what the command understands, and what it does not."""
    chain = name.split()
    at = next(at for at in range(len(tokens)) if list(tokens[at : at + len(chain)]) == chain) + len(chain)
    line = Line(name, list(tokens[:at]))
    row = commands.get(name)
    options = {check.Flags().option(key): key for key, _ in check.leaves(row.job_class())}
    options |= {one: key for key, names in row.short.items() for one in names.split()}
    many = {key for key, hint in check.leaves(row.job_class()) if _takes_many(hint)}
    rest = list(tokens[at:])
    while rest:
        word, values = rest.pop(0), list[str]()
        option, equals, value = word.partition("=")
        if not word.startswith("-") or not _NAME.match(word.lstrip("-")):
            if _is_pair(word) and not row.words:
                _take_pair(line, word, options)
            else:
                line.kept.append(word)
            continue
        plain = option.replace("_", "-")
        single = plain in options and options[plain] not in many
        while rest and (not rest[0].startswith("-") or not _NAME.match(rest[0].lstrip("-"))):
            if single and (values or equals):
                break
            values.append(rest.pop(0))
        if plain in known or option in known:
            line.kept += [word, *values]
            if option in _CONFIG:
                line.files += [value] if equals else values
            elif plain in options:
                line.own[options[plain]] = ([value] if equals else values) or ["true"]
        elif option == "--set":
            for pair in [value] if equals else values:
                _take_pair(line, pair, options)
        else:
            given: Any = value if equals else values if len(values) > 1 else values[0] if values else True
            line.foreign.append(Option(option.lstrip("-").replace("-", "_"), given, option))
    return line


def _takes_many(hint: Any) -> bool:
    return getattr(check.strip_optional(hint)[0], "__origin__", None) in (list, dict)


def _is_pair(word: str) -> bool:
    key, equals, _ = word.lstrip("+").partition("=")  # Hydra adds keys with +
    return bool(equals) and _NAME.fullmatch(key) is not None and not Path(word).exists()


def _take_pair(line: Line, word: str, options: Mapping[str, str]) -> None:
    """Take KEY=VALUE: a setting of ours, or one of another program."""
    key, _, value = word.lstrip("+").partition("=")
    option = check.Flags().option(key.replace("-", "_"))
    if option in options:
        line.kept += [option, value]
    else:
        line.foreign.append(Option(key.replace("-", "_"), value, key))


def explain_line(line: Line, word: str, known: Collection[str], see: str) -> ConfigError:
    """Return the error for a line with options that do not exist, and the line put right."""
    own = _given(line)
    answer = foreign.look_up(line.command, line.foreign, own)
    settings: dict[str, Any] = {}
    clauses: list[str] = []
    open_ = False
    by_name = {one.typed: one for one in answer.words}
    for option in line.foreign:
        meant = _inside(option.name, known)
        found = by_name.get(option.shown)
        if found is not None and not (meant and not set(meant) & set(map(check.Flags().option, found.keys))):
            mine = f"Did you mean {' or '.join(meant)}?" if meant else ""
            clauses.append(f'"{option.shown}". {mine}' if mine else found.said(check.Flags()))
            continue
        if len(meant) == 1:
            settings[meant[0]] = option.value
        open_ = open_ or len(meant) != 1
        guess = f" Did you mean {' or '.join(meant)}?" if meant else own_guess(option.shown, known)
        clauses.append(f'"{option.shown}".{guess}'.removesuffix("."))
    if not clauses:
        return ConfigError(f"{word} is given as a word; here it is an option", line.typed())
    if len(clauses) > _MOST:
        clauses[_MOST:] = [f"and {len(clauses) - _MOST} more"]
    hint = see if open_ else answer.problem
    if not hint:
        more = [part for key, value in answer.settings.items() for part in _words(line.command, key, value)]
        plain = [part for option, value in settings.items() for part in _plain(option, value)]
        hint = line.typed([*plain, *more])
    what = "option" if line.foreign[0].shown.startswith("-") else "word"
    return ConfigError(f"unknown {what} {'; '.join(clauses)}".removesuffix("."), hint)


def _given(line: Line) -> dict[str, Any]:
    """Return what the line says in our own words: its recipes, then its options.

    Raises:
        ConfigError: a recipe cannot be read, or a value is of the wrong type.
    """
    root = commands.get(line.command).job_class()
    hints = dict(check.leaves(root))
    given: dict[str, Any] = {}
    for file in line.files:
        given |= {key: value for key, value in recognise.flatten(yaml_file.read(file).tree).items() if key in hints}
    for key, values in line.own.items():
        hint, _ = check.strip_optional(hints[key])
        texts = [check.Text(value) for value in values]
        value = texts if _takes_many(hint) else texts[0]
        given[key] = check.convert(value, hints[key], check.Flags(), tuple(key.split(".")))
    if "batch.seq_len" in hints and given.get("batch.seq_len") is None:
        positions = length.positions_of(length.config_of(str(given.get("model") or given.get("model.path") or "")))
        if positions is not None:  # as the job itself follows the model
            given["batch.seq_len"] = min(SEQ_LEN, positions)
    return given


def _inside(name: str, known: Collection[str]) -> list[str]:
    """Return the options that are called so inside of a section, or at the top."""
    last = name.replace("_", "-")
    return [one for one in known if one.startswith("--") and one.lstrip("-").rpartition(".")[2] == last]


def own_guess(word: str, known: Collection[str]) -> str:
    """Return ` Did you mean ...?` with the options of ours that are called so, or the nearest one."""
    inside = _inside(word.lstrip("-"), known)
    return f" Did you mean {' or '.join(inside)}?" if inside else did_you_mean(word.replace("_", "-"), known, _ALIKE)


def _plain(option: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [] if value is True else [value]
    return [option, *map(str, values)]


def _words(command: str, key: str, value: Any) -> list[str]:
    """Return a setting as words of a line."""
    option = check.Flags().option(key)
    if isinstance(value, bool):
        head, _, last = option.removeprefix("--").rpartition(".")
        return [option] if value else [f"--{head}.no-{last}" if head else f"--no-{last}"]
    if isinstance(value, dict):
        return [option, *(f"{name}={one}" for name, one in value.items())]
    if isinstance(value, list):
        return [option, *(map(str, value) if value else ["[]"])]
    if isinstance(value, float):
        text = str(int(value)) if value.is_integer() and abs(value) < 1e15 else str(value)
        return [option, re.sub(r"e([+-])0+(?=\d)", r"e\1", text)]
    return [option, "null" if value is None else str(value)]


def explain_file(file: str, name: str, tokens: list[str]) -> ConfigError | None:
    """Return whose file it is, and the line that runs or converts it; None where nothing tells.

    Args:
        file: one of the words of the line.
        name: the command that it was given to; empty: none.
        tokens: the line.
    """
    kind = recognise.kind_of(Path(file))
    if kind is None:
        return None
    if kind.program == recognise.OURS:
        return _own_recipe(file, name, tokens, kind)
    shown = ", ".join(kind.keys[:4])
    if file.endswith(".sh"):
        message = f"{file} is a script of {kind.title} ({shown})"
    else:
        message = f"{file} holds settings of {kind.title} ({shown})"
    if kind.program == "deepspeed" and not file.endswith(".sh"):
        command = name or "sft"
        if "parallel.deepspeed" in dict(check.leaves(commands.get(command).job_class())):
            return ConfigError(message, _with(tokens, file, name, command, ["--parallel.deepspeed", file]))
    if kind.program in _NO_CONVERTER:
        return _as_options(file, kind.commands[0], tokens, message)
    if kind.program in (recognise.ACCELERATE, "transformers") or (kind.program == "deepspeed" and not kind.commands):
        return _as_options(file, name or "sft", tokens, message)
    new = f"{Path(file).stem}-anabatic.yaml"
    command = kind.commands[0] or name or "sft"
    convert = shlex.join(["anabatic", "config", f"from-{kind.program}", file])
    use = [*(["-c"] if command != "run" else []), new]
    run = _with(tokens, file, name, command, use)
    return ConfigError(message, f"{convert} > {shlex.quote(new)} && {run}")


def _own_recipe(file: str, name: str, tokens: list[str], kind: recognise.Kind) -> ConfigError | None:
    if name in kind.commands:
        use = [file] if name == "run" else ["-c", file]
        return ConfigError(
            f"{file} does not belong to an option. Did you mean -c {file}?", _with(tokens, file, name, name, use)
        )
    others = " or ".join(f"`anabatic {one}`" for one in kind.commands[:3])
    command = kind.commands[0]
    use = [file] if command == "run" else ["-c", file]
    not_this = f", not for `anabatic {name}`" if name else ""
    return ConfigError(f"{file} is a recipe for {others}{not_this}", _with([], file, "", command, use))


def _as_options(file: str, command: str, tokens: list[str], message: str) -> ConfigError:
    """Return the error for a file of arguments, with the line that says the same in options."""
    tree = recognise.tree_of(Path(file))
    if "actor_rollout_ref" in tree:
        tree = recognise.flatten(tree)
    if isinstance(entries := tree.get("datasets"), list):  # axolotl's
        files = [one.get("path") for one in entries if isinstance(one, dict)]
        tree = {**tree, "datasets": [str(file) for file in files if file]}
    given = [Option(key.replace("-", "_"), value, key) for key, value in tree.items()]
    answer = foreign.look_up(command, [one for one in given if foreign.knows(one.name)])
    if answer.problem:
        return ConfigError(message, answer.problem)
    more = [part for key, value in answer.settings.items() for part in _words(command, key, value)]
    return ConfigError(message, _with(tokens, file, command, command, more))


def _with(tokens: list[str], file: str, name: str, command: str, use: Sequence[str]) -> str:
    """Return the line with other words in the place of `-c FILE`; a line of another command is written anew."""
    chain = name.split()
    starts = [at for at in range(len(tokens)) if chain and tokens[at : at + len(chain)] == chain]
    if not starts or name != command:
        before = tokens[: starts[0]] if starts else []  # launch and plan are given the command behind --
        return shlex.join(["anabatic", *before, *command.split(), *use])
    line = list(tokens)
    at = line.index(file)
    first = at - 1 if at and line[at - 1] in _CONFIG else at
    before, after = line[:first], line[at + 1 :]
    swallowed = use[:1] == ["-c"] or use[:1] == [file]
    return shlex.join(["anabatic", *before, *use, *after] if swallowed else ["anabatic", *before, *after, *use])
