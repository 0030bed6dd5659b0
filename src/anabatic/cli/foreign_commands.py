"""Commands of other programs, typed here out of habit: the command that does it here, with their options put right."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import UnknownCommandError

from anabatic.cli import usage_hints
from anabatic.config.loading import command_table
from anabatic.convert import converter, file_detection, peer_tables
from anabatic.core.errors import ConfigError

_COMMAND_ALIASES = {
    "finetune": "sft", "fine-tune": "sft", "lora": "sft", "grpo": "rl", "ppo": "rl", "kto": "dpo", "orpo": "dpo",
    "rm": "reward", "generate": "infer", "inference": "infer", "predict": "infer", "evaluate": "eval",
    "tokenize": "tokenizer train", "convert": "export", "upload": "export", "check": "doctor", "smi": "monitor",
    "lm_eval": "eval", "lm-eval": "eval",
}  # fmt: skip
"""Names for what is done that no table has -> the command."""
_PROGRAMS = ("swift", "megatron", "llamafactory-cli", "lmf", "vllm", "axolotl")
"""Programs whose first word is the command."""
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "srun", "msrun")


def explain_unknown_command(error: UnknownCommandError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what a command of another program is here, or what a file without a command is for."""
    word = (error.unused_tokens or [""])[0]
    if error.command_chain:
        return None
    if file_detection.is_recipe_file(word):
        return usage_hints.explain_file(word, "", list(tokens))
    rest = [token for token in tokens if token != word]
    file = next((token for token in rest if file_detection.is_recipe_file(token)), None)
    if file is not None and (found := usage_hints.explain_file(file, "", rest)) is not None:
        return found
    if word in _LAUNCHERS:
        what = f'unknown command "{word}": processes are started by the commands themselves'
        return ConfigError(what, "anabatic sft --device.nproc 8 ..., on several machines anabatic launch --help")
    if word in _PROGRAMS and rest and not rest[0].startswith("-"):
        program, word, rest = word, rest[0], rest[1:]
        shown = f"{program} {word}"
        if word in command_table.COMMANDS:
            return ConfigError(f'unknown command "{shown}": `anabatic {word}` here', _format_our_command(word, rest))
    else:
        shown = word
    if word in _COMMAND_ALIASES:
        ours = _COMMAND_ALIASES[word]
        return ConfigError(f'unknown command "{shown}": `anabatic {ours}` here', _format_our_command(ours, rest))
    for peer in ("llamafactory", "swift"):
        for row in peer_tables.load_tables(peer).tables["commands"]:
            if any(name.partition(" ")[2] == word for name in row.theirs):
                return _explain_peer_command(peer, row, shown, rest)
    return None


def _explain_peer_command(peer: str, row: peer_tables.MappingRow, shown: str, rest: Sequence[str]) -> ConfigError:
    """Return what a command of a table is here."""
    here = row.here.get("en", "").replace("`", "") or f"anabatic {row.command}"
    note = f" ({row.note['en']})".replace("`", "") if row.note else ""
    told = f'unknown command "{shown}" (of {peer_tables.load_tables(peer).title}): {here} here{note}'
    if not row.command:
        return ConfigError(told, "see `anabatic --help`")
    kinds = {name: one for one in peer_tables.load_tables(peer).all_rows() if one.fact == "kind" for name in one.theirs}
    ours, words = row.command, list(rest)
    for at, word in enumerate(rest):
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if word.startswith("-") and name in kinds:
            value = value if equals else rest[at + 1] if at + 1 < len(rest) else ""
            try:
                ours = converter.command_for_tree(peer, {name: value})
            except ConfigError as error:
                return ConfigError(f"{told}; {error}".removesuffix("."), error.hint)
            words = [one for place, one in enumerate(rest) if place != at and (equals or place != at + 1)]
            break
    return ConfigError(told, _format_our_command(ours, words))


def _format_our_command(command: str, rest: Sequence[str]) -> str:
    """Return the line of our command with what stood behind theirs, its options put right."""
    if not rest:
        return f"see `anabatic {command} --help`"
    words = [one for at, word in enumerate(rest) for one in (["-c", word] if _find_lone_recipe(rest, at) else [word])]
    known = usage_hints.options_of(command)
    line = usage_hints.parse_line([*command.split(), *words], command, known)
    if not line.foreign_options:
        return line.format_line()
    hint = usage_hints.explain_foreign_options(
        line, line.foreign_options[0].original_text, known, f"see `anabatic {command} --help`"
    ).hint
    return hint or line.format_line()


def _find_lone_recipe(words: Sequence[str], at: int) -> bool:
    return words[at].endswith((".yaml", ".yml")) and not (at and words[at - 1].startswith("-"))
