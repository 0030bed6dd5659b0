"""Write docs/*/reference/config.md, cli.md and settings-that-matter.md from the settings and the command table, in both
languages, the tables of docs/*/guides/migration.md, and the Chinese texts of the studio's form.

usage: python scripts/gen_reference.py [--check]     --check only says whether the pages are current

The Chinese texts of the settings stand in reference_zh.yaml, keyed by class and field; a setting without one
keeps its English text, and the script says which. What is said of the common settings stands in
settings_that_matter.yaml, in both languages.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import migration_tables
from anabatic.cli import run
from anabatic.cli.parsing.function_command import make_function_command
from anabatic.config.loading import command_table, common_settings, settings, validation, yaml_reader

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by scripts/gen_reference.py (make reference); do not edit. -->"


class English:
    """The words of the English pages."""

    code = "en"
    texts = yaml.safe_load((ROOT / "scripts" / "reference_en.yaml").read_text(encoding="utf-8"))

    def meaning(self, key: str, english: str) -> str:
        """Return the text of a class (`Optim`) or field (`Optim.lr`)."""
        return english


class Chinese(English):
    """The words of the Chinese pages."""

    code = "zh"
    texts = yaml.safe_load((ROOT / "scripts" / "reference_zh.yaml").read_text(encoding="utf-8"))

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.missing: list[str] = []

    def meaning(self, key: str, english: str) -> str:
        """Return the Chinese text, or the English one where there is none yet."""
        if key not in self.texts["settings"]:
            self.missing.append(key)
            return english
        self.used.add(key)
        return str(self.texts["settings"][key])


def kind(hint: Any, words: dict[str, str]) -> str:
    """Return the type of a setting in words."""
    inner, _ = validation.strip_optional(hint)
    origin = typing.get_origin(inner) or inner
    if origin is typing.Literal:
        return " ".join(f"`{choice}`" for choice in typing.get_args(inner))
    if origin is list:
        return words["list"].format(kind(typing.get_args(inner)[0], words))
    return words["dict" if dataclasses.is_dataclass(origin) else origin.__name__]


def row(cls: type, name: str, hint: Any, value: Any, key: str, language: English) -> str:
    """Return one line of a table of settings."""
    default = "" if value in ("", None, [], {}) else f"`{yaml_reader.dump_scalar(value)}`"
    meaning = language.meaning(
        f"{settings.find_documenting_class(cls, name).__name__}.{name}",
        settings.field_docs(cls).get(name, ""),
    )
    cells = (f"`{key}`", kind(hint, language.texts["types"]), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(cls: type, values: dict[str, Any], prefix: str, language: English) -> list[str]:
    """Return the settings of `cls` that are not sections, as a table."""
    plain = {name: hint for name, hint in validation.field_types(cls).items() if not dataclasses.is_dataclass(hint)}
    head = language.texts["columns"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, hint in plain.items():
        lines.append(row(cls, name, hint, values[name], prefix + name, language))
    return lines


def sections(cls: type) -> dict[str, type]:
    """Return section name -> dataclass."""
    return {name: hint for name, hint in validation.field_types(cls).items() if dataclasses.is_dataclass(hint)}


def usage() -> dict[tuple[str, type], list[str]]:
    """Return (section name, class) -> the commands that have it."""
    result: dict[tuple[str, type], list[str]] = {}
    for name, command in command_table.COMMANDS.items():
        for section, cls in sections(command.import_job_class()).items():
            result.setdefault((section, cls), []).append(name)
    return result


def nested(cls: type) -> Iterator[tuple[str, type]]:
    """Yield the dataclasses that are values of a mapping (`stages` of a pipeline)."""
    for name, hint in validation.field_types(cls).items():
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) is dict and dataclasses.is_dataclass(arguments[1]):
            yield name, arguments[1]


def other_defaults(cls: type, section: str, section_cls: type) -> str:
    """Return the defaults of a section that differ for this command: `name: adamw, eps: 1.0e-08`."""
    general, own = settings.default_tree(section_cls), settings.default_tree(cls)[section]
    return ", ".join(f"`{key}: {yaml_reader.dump_scalar(own[key])}`" for key in own if own[key] != general[key])


def described(cls: type, language: English) -> list[str]:
    """Return the paragraphs that explain a class."""
    return [language.meaning(cls.__name__, settings.class_doc(cls)), ""]


def config_page(language: English) -> str:
    """Return the page of all settings: one chapter for each command, one for each section."""
    texts = language.texts["config"]
    lines = [f"# {texts['title']}", "", NOTE, "", texts["intro"], "", f"## {texts['commands']}", ""]
    for name, command in command_table.COMMANDS.items():
        cls = command.import_job_class()
        lines += [f"### anabatic {name}", "", *described(cls, language)]
        lines += [*table(cls, settings.default_tree(cls), "", language), ""]
        for key, inner in nested(cls):
            lines += [texts["nested"].format(key=key), ""]
            lines += [*table(inner, settings.default_tree(inner), f"{key}.NAME.", language), ""]
        own = sections(cls)
        if own:
            links = ", ".join(f"[`{section}`](#{anchor(section, of)})" for section, of in own.items())
            lines += [texts["sections"].format(links=links), ""]
        for section, of in own.items():
            if changed := other_defaults(cls, section, of):
                lines += [texts["defaults"].format(section=section, changed=changed), ""]
    lines += [f"## {texts['all_sections']}", ""]
    shared_names = Counter(section for section, _ in usage())
    for (section, cls), users in usage().items():
        used = ", ".join(f"`{name}`" for name in users)
        title = f"{section} ({users[0]})" if shared_names[section] > 1 else section
        lines += [f"### {title} {{#{anchor(section, cls)}}}", "", *described(cls, language)]
        lines += [texts["used"].format(used=used), ""]
        lines += [*table(cls, settings.default_tree(cls), f"{section}.", language), ""]
    return "\n".join(lines).rstrip() + "\n"


def anchor(section: str, cls: type) -> str:
    """Return the anchor of a section's chapter."""
    return f"section-{section}-{cls.__name__.lower()}"


def cli_page(language: English) -> str:
    """Return the page of all commands."""
    texts = language.texts["cli"]
    lines = [f"# {texts['title']}", "", NOTE, "", texts["intro"], "", f"## {texts['commands']}", ""]
    for name, command in command_table.COMMANDS.items():
        if name == "run":
            continue
        lines += [f"### anabatic {name}", "", language.meaning(f"help.{name}", command.help), ""]
        lines += ["```text", f"anabatic {name} [-c FILE ...] [--KEY VALUE ...]", "```", ""]
        for key, options in command.option_aliases.items():
            lines += [f"- `{option}` = `--{key.replace('_', '-')}`" for option in options.split()]
        lines += ["", texts["settings"].format(anchor="anabatic-" + name.replace(" ", "-")), ""]
    lines += run_chapter(language)
    lines += [texts["config"].rstrip(), "", texts["codes"].rstrip(), "", texts["variables"].rstrip()]
    return "\n".join(lines) + "\n"


def run_chapter(language: English) -> list[str]:
    """Return the chapter on `anabatic run`, which has options of its own."""
    interface = make_function_command(run.run).interface
    lines = ["### anabatic run", "", language.meaning("help.run", command_table.COMMANDS.find_row("run").help), ""]
    lines += ["```text", "anabatic run FILE.yaml [FILE.yaml ...] [OPTION ...]", "```", ""]
    lines += ["| " + " | ".join(language.texts["cli"]["columns"]) + " |", "|---|---|"]
    rows = [("FILE.yaml", "recipes", interface.arguments[0].help)]
    rows += [(option.names[0], option.key, option.help) for option in interface.options]
    for option, key, meaning in rows:
        lines += [f"| `{option}` | {language.meaning(f'run.{key}', meaning)} |"]
    return [*lines, ""]


def settings_that_matter_page(code: str) -> str:
    """Return the page of the common settings: a chapter for each command, a table for each task.

    Raises:
        SystemExit: a setting has no text, or a text has no setting.
    """
    source = yaml.safe_load((ROOT / "scripts" / "settings_that_matter.yaml").read_text(encoding="utf-8"))
    page, texts, unused = source["page"][code], source["texts"], set(source["texts"])
    lines = [f"# {page['title']}", "", NOTE, "", page["intro"], ""]
    for command in common_settings.list_common_commands():
        defaults = settings.default_tree(command_table.COMMANDS.find_row(command).import_job_class())
        lines += [f"## anabatic {command}", ""]
        for task, keys in common_settings.get_common_settings(command).items():
            lines += [f"**{task if code == 'en' else source['tasks'][task]}**", ""]
            lines += ["| " + " | ".join(page["columns"]) + " |", "|---|---|---|"]
            for key in keys:
                text = next((name for name in (f"{command}: {key}", key) if name in texts), None)
                if text is None:
                    sys.exit(f"error: scripts/settings_that_matter.yaml has no text for {command}: {key}")
                unused.discard(text)
                lines.append(f"| `{key}` | {format_default(defaults, key)} | {texts[text][code]} |")
            lines.append("")
    if unused:
        sys.exit(f"error: scripts/settings_that_matter.yaml has texts without a setting: {', '.join(sorted(unused))}")
    return "\n".join(lines).rstrip() + "\n"


def format_default(tree: dict[str, Any], key: str) -> str:
    """Return the default value of a dotted key as it stands in a table; nothing where none is set."""
    value: Any = tree
    for name in key.split("."):
        value = value[name]
    return "" if value in ("", None, [], {}) else f"`{yaml_reader.dump_scalar(value)}`"


def form_texts(language: English) -> str:
    """Return the texts of the studio's form in another language: of settings by class and field, of groups of them."""
    tasks = yaml.safe_load((ROOT / "scripts" / "settings_that_matter.yaml").read_text(encoding="utf-8"))["tasks"]
    fields = {key: text for key, text in language.texts["settings"].items() if key[0].isupper() and "." in key}
    return json.dumps({"groups": tasks, "fields": fields}, ensure_ascii=False, indent=1) + "\n"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page that is generated, wholly or in part; complain about Chinese texts of what is gone."""
    for language in (English(), Chinese()):
        folder = ROOT / "docs" / language.code / "reference"
        yield folder / "config.md", config_page(language)
        yield folder / "cli.md", cli_page(language)
        yield folder / "settings-that-matter.md", settings_that_matter_page(language.code)
        if isinstance(language, Chinese):
            for key in dict.fromkeys(language.missing):
                print(f"scripts/reference_zh.yaml has no text for {key}")
            if gone := sorted(language.texts["settings"].keys() - language.used):
                sys.exit(f"error: scripts/reference_zh.yaml explains what does not exist: {', '.join(gone)}")
            yield ROOT / "src" / "anabatic_studio" / "web" / "form_zh.json", form_texts(language)
    yield from migration_tables.pages()


def main() -> None:
    """Write the pages, or check them."""
    stale = []
    for path, text in pages():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {stale[-1]}")
    if stale and "--check" in sys.argv[1:]:
        sys.exit(f"error: not current: {', '.join(stale)}\nhint: make reference")


if __name__ == "__main__":
    main()
