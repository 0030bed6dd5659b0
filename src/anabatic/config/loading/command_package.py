"""Describe what a package adds to the program: commands, their help and recipes.

A package names its `CommandPackage` in its pyproject.toml; those of this distribution do it the same way:

    [project.entry-points."anabatic.commands"]
    vessels = "anabatic_vessels.command_package:PACKAGE"
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from anabatic.core import cpu_info, extras, log, plugins
from anabatic.core.errors import ConfigError, UserError
from anabatic.core.formatting import did_you_mean

TRAIN, USE, MACHINE, RECIPES = "Train", "Use", "Machine", "Recipes"
GROUPS = (TRAIN, USE, MACHINE, RECIPES)
"""Headings of the general help, in order."""
RECIPE_FOLDER = Path(__file__).resolve().parents[1] / "recipes"
"""Recipes of the main package."""
DATA_ALIASES = {"data.train": "--data"}
"""Shorter names of options of commands that read text."""
DEVICE_ALIASES = {**DATA_ALIASES, "device.nproc": "--nproc --npus"}
"""Of commands that run on several devices."""
TRAIN_ALIASES = {**DEVICE_ALIASES, "schedule.minutes": "--minutes"}
"""Of commands that train."""
MODEL_FILES = ("best_model/tokenizer.json", "final_model/tokenizer.json")
"""Files that a training writes, which later jobs read."""


@dataclass(frozen=True)
class Command:
    """A command that runs a job: its options are the settings of the job."""

    name: str
    """Words as typed, for example `tokenizer train`."""
    config: str
    """`module:class` of its settings."""
    recipe: str
    """`module:function` that runs the job."""
    help: str
    """One line."""
    is_training: bool = False
    """It writes `summary.json` with `"finished": true` only when it came to its end."""
    output_files: tuple[str, ...] = ()
    """Files under its `out` that later jobs read."""
    option_aliases: dict[str, str] = field(default_factory=dict)
    """Dotted key -> shorter names of its option, with blanks between them."""
    positional_setting: str = ""
    """The setting that words without an option fill: `classify words FILE FILE`; one word if it is no list."""
    optional_packages: tuple[str, ...] = ()
    """Modules of `core/extras.py` without which nothing of it works."""
    precheck: str = ""
    """`module:function` that yields what is wrong with its files, where its rows are not text: called with the settings
    and a function that is true for outputs of earlier stages, before anything heavy is imported."""

    def import_job_class(self) -> type:
        """Import and return the dataclass of the command's settings."""
        loaded: type = import_attribute(self.config)
        return loaded

    def import_precheck(self) -> Callable[[Any, Callable[[str], bool]], Iterator[UserError]] | None:
        """Import and return the check of the command's own files; None where it reads text as others do."""
        found: Callable[[Any, Callable[[str], bool]], Iterator[UserError]] | None
        found = import_attribute(self.precheck) if self.precheck else None
        return found

    @property
    def schema_file(self) -> Path:
        """The JSON schema of its recipes, in a folder beside the module of its settings; made by the build."""
        spec = importlib.util.find_spec(self.config.partition(":")[0])
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).parent / "schemas" / f"{self.name.replace(' ', '-')}.json"

    def import_recipe_function(self) -> Callable[..., Any]:
        """Import and return the function that runs the job; this is where heavy libraries come in.

        Imports make 650,000 objects that stay; to walk them again and again took a tenth of a start.

        Raises:
            ConfigError: one of `optional_packages` is not installed.
        """
        collects = gc.isenabled()
        gc.disable()
        cpu_info.install_quick_imports()
        try:
            for name in self.optional_packages:
                extras.import_optional(name, f"anabatic {self.name}")
            loaded: Callable[..., Any] = import_attribute(self.recipe)
        finally:
            if collects:
                gc.freeze()
                gc.enable()
        return loaded


@dataclass(frozen=True)
class CommandEntry:
    """A command, or a group of commands, in the help.

    Attributes:
        name: words as typed.
        help: one line; empty: that of the job of this name.
        group: heading of the general help; empty below a group.
        example: what an example gives behind the name.
        needs_separator: a word in front of `--` is a mistyped subcommand, and must not start a program of that name.
        target: `module:name` of its function or `Command`; empty: a job, or only a group.
    """

    name: str
    help: str = ""
    group: str = ""
    example: str = ""
    target: str = ""
    needs_separator: bool = False

    @property
    def last_word(self) -> str:
        """Its name below its group."""
        return self.name.rpartition(" ")[2]


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe inside a package."""

    name: str
    """Name as typed; the file is `NAME.yaml` in `folder`."""
    command: str
    """The command that takes it."""
    summary: str
    """Purpose, in a few words."""
    hardware: str
    """Devices that its settings are chosen for."""
    base: str = ""
    """Of an overlay: the recipe that it changes."""
    folder: Path = RECIPE_FOLDER
    """Folder of the file."""

    def to_dict(self) -> dict[str, str]:
        """Return the fields that lists of recipes show."""
        return {key: getattr(self, key) for key in ("name", "command", "summary", "hardware", "base")}

    @property
    def path(self) -> Path:
        """Its file."""
        return self.folder / f"{self.name}.yaml"

    @property
    def command_line(self) -> str:
        """A command that uses it; the user adds the model and the data where the recipe has placeholders."""
        if self.base:
            return f"anabatic {self.command} {self.base} -c {self.name}"
        return f"anabatic run {self.name}" if self.command == "run" else f"anabatic {self.command} -c {self.name}"


@dataclass(frozen=True)
class CommandPackage:
    """Commands, help and recipes that a package adds. The first word of a command's name belongs to one package.

    Attributes:
        commands: jobs.
        entries: rows of the help: one for each job, others for commands that are functions.
        recipes: recipes that it ships.
        served_classifier: `module:class` of what `serve --classifier` loads: `(folder, device settings)`.
    """

    commands: tuple[Command, ...] = ()
    entries: tuple[CommandEntry, ...] = ()
    recipes: tuple[ShippedRecipe, ...] = ()
    served_classifier: str = ""


def import_attribute(path: str) -> Any:
    """Import and return what `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def load_packages() -> tuple[CommandPackage, ...]:
    """Load the packages that are installed, in the order of their names; one that cannot be loaded is left out, with a
    warning, so that the other commands still work."""
    loaded: list[CommandPackage] = []
    for name in plugins.list_plugins("anabatic.commands"):
        try:
            package = plugins.load_plugin("anabatic.commands", name)
        except ConfigError as error:
            log.warn(f"{error}; {error.hint}")
            continue
        if isinstance(package, CommandPackage):
            loaded.append(package)
        else:
            log.warn(f'the plug-in "{name}" of anabatic.commands is a {type(package).__name__}, not a CommandPackage')
    return tuple(loaded)


def find_command_name(job: Any, commands: Iterable[Command]) -> str:
    """Return the name of the command whose settings `job` is."""
    return next(row.name for row in commands if row.config.endswith(f":{type(job).__name__}"))


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=_Named)


class CommandTable(Mapping[str, Row]):
    """Rows by name: those of the main package, then those of others.

    Other packages are looked for (20 ms) only when a first word is asked for that the main package has not.
    """

    def __init__(self, rows: Iterable[Row], select_rows: Callable[[CommandPackage], Iterable[Row]]) -> None:
        self._own = {row.name: row for row in rows}
        self._first_words = {name.partition(" ")[0] for name in self._own}
        self._select_rows = select_rows

    @functools.cached_property
    def _others(self) -> dict[str, Row]:
        found: dict[str, Row] = {}
        owners: dict[str, CommandPackage] = {}
        for package in load_packages():
            for row in self._select_rows(package):
                word = row.name.partition(" ")[0]
                if word in self._first_words or owners.setdefault(word, package) is not package:
                    log.warn(f'two packages have a command or recipe "{word}": that of the later one is left out')
                else:
                    found[row.name] = row
        return found

    def __getitem__(self, name: str) -> Row:
        if name in self._own:
            return self._own[name]
        if name.partition(" ")[0] in self._first_words:
            raise KeyError(name)
        return self._others[name]

    def find_row(self, name: str) -> Row:
        """Return the row called `name`.

        Raises:
            ConfigError: there is none.
        """
        if name not in self:
            hint = f"commands: {', '.join(self)}"
            raise ConfigError(f'unknown command "{name}".{did_you_mean(name, self)}', hint)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._others

    def __len__(self) -> int:
        return len(self._own) + len(self._others)
