"""The guides' tables: the right sides exist, and what guides for Ascend make their readers type has a row."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.cli import command_tree
from anabatic.config.loading import command_table, shipped_recipes, validation, yaml_reader
from anabatic.convert import converter, peer_tables
from anabatic.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
GUIDES = ROOT / "docs"
PAGES = [f"{language}/guides/{name}.md" for language in ("en", "zh") for name in ("migration", "migration-guides")]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
RUN_FOLDER = {"metrics.jsonl", "rank-0.log", "report.html", "best_model", "final_model"}
FORMS = re.compile(
    r"pip install 'anabatic\[vessels\]'|"
    r"(PATH|路径)(@(SHARE|比例)|#N)|model:(FOLDER|目录)|TrajectoryClassifier|[A-Z][A-Z0-9_]+(=0)?"
)
"""What else may stand on the right: ways to write a value, a class of ours, a variable."""
PEERS = sorted(file.stem for file in peer_tables.TABLES_FOLDER.glob("*.yaml"))


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of the tables of three columns."""
    for line in FENCE.sub("", text).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("There", "那边", "---"):
            yield cells


def leaves(command: str) -> set[str]:
    row = command_table.COMMANDS.find_row(command)
    short = {word for words in row.option_aliases.values() for word in words.split()}
    keys = {key for key, _ in validation.iter_settings(row.import_job_class())}
    return keys | short | {"--" + key.replace("_", "-") for key in keys}


SETTINGS = {name: leaves(name) for name in command_table.COMMANDS}
SECTIONS = {key.partition(".")[0] for some in SETTINGS.values() for key in some}


def exists(span: str) -> bool:
    """True for a setting, an option, a command with its options, a recipe, or a file of a run folder."""
    words = span.removeprefix("anabatic ").split()
    name = next((" ".join(words[:n]) for n in (2, 1) if known(words[:n])), "")
    if name:
        options = [word for word in words if word.startswith("--")]
        return all(option in SETTINGS.get(name, set()) or option in text_of(name) for option in options)
    if span.startswith("-c "):
        return span.removeprefix("-c ") in shipped_recipes.RECIPES
    key = span.partition(":")[0].partition(" ")[0]
    some = any(key in one for one in SETTINGS.values()) or key in SECTIONS
    return some or span in RUN_FOLDER or FORMS.fullmatch(span) is not None


def known(words: list[str]) -> bool:
    return " ".join(words) in command_tree.COMMANDS


def text_of(name: str) -> str:
    """The source of a command that is no job: its options stand there."""
    source = ROOT / "src" / "anabatic" / "cli"
    first = name.partition(" ")[0]
    files = sorted([*source.glob(f"{first}*.py"), *source.glob(f"{first}/*.py")])
    launch = [ROOT / "src/anabatic/config/sections/launch.py"] if name.startswith("launch") else []
    text = "\n".join(file.read_text(encoding="utf-8") for file in [*files, *launch])
    return "".join(f" --{word.replace('_', '-')} " for word in re.findall(r"\w+", text))


@pytest.mark.parametrize("page", PAGES)
def test_what_stands_on_the_right_exists(page: str) -> None:
    text = (GUIDES / page).read_text(encoding="utf-8")
    found = list(rows(text))
    assert len(found) > 80
    wrong = [(cells[0], span) for cells in found for span in re.findall(r"`([^`]+)`", cells[1]) if not exists(span)]
    assert not wrong


def test_nonsense_does_not_exist() -> None:
    for span in ("optim.learning_rate", "anabatic trainn", "anabatic sft --lora-rank", "-c none", "nothing"):
        assert not exists(span), span


@pytest.mark.parametrize("peer", PEERS)
def test_rows_are_whole(peer: str) -> None:
    """Every setting exists somewhere, every command is one, both languages say something or neither does."""
    for row in peer_tables.load_tables(peer).all_rows():
        assert row.how in peer_tables.ROW_ACTIONS, row
        assert all(any(key in some for some in SETTINGS.values()) for key in row.ours), row
        assert not row.command or row.command in command_table.COMMANDS, row
        assert all(key in SETTINGS[row.command] for key in (*row.sets, *row.open)), row
        assert all(one in command_table.COMMANDS for one in row.only), row
        assert set(row.note) in (set(), {"en", "zh"}), row
        assert row.ours or row.here or row.command, f"{row.theirs}: nothing on the right"
        assert set(row.here) in (set(), {"en", "zh"}), row
        if row.how == "values":
            for value in row.values.values():
                assert value is None or any(fits(value, hint) for hint in hints(row)), (row, value)


def fits(value: object, hint: object) -> bool:
    try:
        validation.convert_value(value, hint, validation.SettingNamer(), ())
    except ConfigError:
        return False
    return True


def hints(row: peer_tables.MappingRow) -> Iterator[object]:
    for name in row.only or command_table.COMMANDS:
        types = dict(validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class()))
        chosen = [types[key] for key in row.ours if key in types]
        yield from chosen[:1]


@pytest.mark.parametrize("peer", PEERS)
def test_defaults_have_rows(peer: str) -> None:
    names = {
        name
        for file in (peer, "transformers", "launch")
        for row in peer_tables.load_tables(file).all_rows()
        for name in row.theirs
    }
    assert all(default.name in names for default in peer_tables.load_tables(peer).defaults)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_table_is_in_the_guide(language: str) -> None:
    text = (GUIDES / language / "guides" / "migration.md").read_text(encoding="utf-8")
    shown = [name for names in re.findall(r"<!-- tables: ([\w. ]+) -->", text) for name in names.split()]
    assert sorted(shown) == sorted(
        f"{peer}.{table}" for peer in PEERS for table in peer_tables.load_tables(peer).tables
    )


FILE = re.compile(r"[\w*.-]*\w\.(?:sh|py|json|jsonl|run|log|txt|bin|csv)\b")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z_-]+)")
VARIABLE = re.compile(r"\b(?:export ([A-Z]\w*)|([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+))=")
MODULE = re.compile(r"-m ((?:scripts|pytest)[\w.]*)")
ASSIGNED = re.compile(r"^\s*([a-z]\w*)\s*=\s*[^=]", re.M)
CALLED = re.compile(r"\.?\b([A-Za-z_]\w+)\(")
TABLE = re.compile(r"^\| `([a-z]\w+)` \|", re.M)
KEY = re.compile(r'"(\w+)":')
FOLDER = re.compile(r"(best_model|final_model|checkpoint-\*|trained_models|model_out|logs|trajectory_\w+_model_npu)/")
PROGRAM = re.compile(
    r"(npu-smi info(?: -t \w+)?|\bwatch|pip config|pip install|git clone|\bwget|conda create|source|\btail|\bcat\b|"
    r"\bgrep|\bping|netstat|pkill|systemctl restart|\bvim|chmod|setup\.py install|swift (?:sft|infer)|"
    r"run_training_npu\.sh \w+|default-zero\d|qwen1half-7b-chat|blossom-math-zh)"
)
NO_SETTINGS = {"text", "result", "base_model", "model", "tokenizer", "inferencer", "print", "list", "range"}
"""Names in examples of Python that set nothing."""


def typed(seed: str) -> Iterator[str]:
    """Yield what a guide makes its reader type or set."""
    for pattern in (FILE, OPTION, MODULE, TABLE, FOLDER, PROGRAM):
        yield from pattern.findall(seed)
    yield from (exported or plain for exported, plain in VARIABLE.findall(seed))
    for language, block in FENCE.findall(seed):
        if language == "python":
            names = [*ASSIGNED.findall(block), *CALLED.findall(block)]
            yield from (name for name in names if name not in NO_SETTINGS)
        if language == "json":
            yield from KEY.findall(block)


def sections(page: Path) -> list[str]:
    """Return the left columns of the chapters, one text each."""
    chapters = page.read_text(encoding="utf-8").split("\n## ")[1:]
    return ["\n".join(cells[0] for cells in rows(chapter)) for chapter in chapters]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_command_of_a_guide_has_a_row(number: int, language: str) -> None:
    seeds = sorted((ROOT.parent / "shared" / "seeds").glob("*.txt"))
    if len(seeds) < 5:
        pytest.skip("the guides for Ascend are not beside the checkout")
    seed = seeds[number].read_text(encoding="utf-8")
    wanted = dict.fromkeys(typed(seed))
    assert len(wanted) > 15
    left = sections(GUIDES / language / "guides" / "migration-guides.md")[number]
    assert not [word for word in wanted if word not in left]


@pytest.mark.parametrize(
    ("number", "peer", "mark", "least"), [(1, "nanochat", r"-m scripts\.", 6), (4, "swift", "swift (sft|infer)", 6)]
)
def test_commands_of_guides_are_converted(number: int, peer: str, mark: str, least: int) -> None:
    """Whole, with nothing that the converter has never heard of."""
    seeds = sorted((ROOT.parent / "shared" / "seeds").glob("*.txt"))
    if len(seeds) < 5:
        pytest.skip("the guides for Ascend are not beside the checkout")
    found = FENCE.findall(seeds[number].read_text(encoding="utf-8"))
    blocks = [textwrap.dedent(block) for _, block in found if re.search(mark, block)]
    done = 0
    for block in blocks:
        made = converter.convert_command(peer, [block])
        assert not any(note.startswith("not known") for note in made.messages), made.messages
        tree = yaml_reader.parse_yaml(made.text, "printed").tree
        done += len(tree.get("stages", [0]))
    assert done >= least
