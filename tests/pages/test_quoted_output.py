"""What the pages show as text: output has the words of the program, trees name files that are there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from anabatic.config.loading import shipped_recipes
from anabatic.launch.hosts import hostfile
from house import tree
from pages import blocks, stand
from pages.stand import Stand

Check = Callable[[blocks.Block, Stand], None]
WORD = re.compile(r"[A-Za-z][A-Za-z_-]{2,}")
PLAIN = re.compile(r"[A-Za-z][A-Za-z_'-]*")


def fragments(line: str, free: frozenset[str]) -> list[str]:
    """Return the runs of words between numbers, paths and marks, without those that are the example's own."""
    line = re.sub(r"\S*[/@=<>|\[\]{}\\]\S*|\S*\.\w+\S*|\S*\d\S*|[^\w\s'-]|\s{2,}", "\0", line)
    found = []
    for part in line.split("\0"):
        run: list[str] = []
        for word in part.split():
            if PLAIN.fullmatch(word) and word not in free:
                run.append(word)
            else:
                found.append(" ".join(run))
                run = []
        found.append(" ".join(run))
    return [one for one in found if WORD.search(one)]


@functools.cache
def texts() -> str:
    """Return every text in the source, the ends of formatted numbers cut off, and the program's own YAML."""
    found: list[str] = []
    for path in tree.sources():
        found += [node.value for node in ast.walk(tree.parse(path)) if text_node(node)]
    found += [path.read_text(encoding="utf-8") for path in sorted(tree.SRC.rglob("*.yaml"))]
    return "\n".join(found)


def is_text(run: str) -> bool:
    """True when a text of the program holds a run of words; one value among them may be a word, too."""
    parts = run.split()
    pairs = [(" ".join(parts[:at]), " ".join(parts[at:])) for at in range(1, len(parts))]
    return run in texts() or any(left in texts() and right in texts() for left, right in pairs)


def text_node(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def written(*free: str) -> Check:
    """Every run of words stands in the source: a message that a reader may see, on hardware that is not here."""

    def check(block: blocks.Block, _: Stand) -> None:
        own = frozenset(" ".join(free).split())
        runs = [run for line in block.text.splitlines() for run in fragments(line, own)]
        lost = [run for run in runs if not is_text(run)]
        assert not lost, f"no text of the program has {lost}"
        assert len(runs) >= 3

    return check


def headings(*free: str) -> Check:
    """Every word stands in the source: a table whose columns are named one by one."""

    def check(block: blocks.Block, _: Stand) -> None:
        lost = {word for word in WORD.findall(block.text) if not re.search(rf"\b{word}\b", texts())}
        assert not lost - set(" ".join(free).split()), f"no text of the program has {sorted(lost)}"

    return check


def said(text: str, *free: str) -> Check:
    """Every word stands in what a command prints."""

    def check(block: blocks.Block, made: Stand) -> None:
        folder = made.paper if text.startswith("plan") else made.folder
        told = stand.end(stand.run(text.split(), folder, {}, made.cache))
        own = set(" ".join(free).split())
        lost = set(WORD.findall(block.text)) - set(WORD.findall(told.out + told.err)) - own
        assert not lost, f"anabatic {text} does not print {sorted(lost)}\n{told.out}\n{told.err}"

    return check


def names(block: blocks.Block) -> Iterator[str]:
    """Yield the names in the left column of a tree, without its root."""
    for line in block.text.splitlines():
        if line.strip() and (line.startswith(" ") or not line.rstrip().endswith("/")):
            yield from re.split(r",\s*", re.split(r"\s{2,}", line.strip())[0])


def repository(block: blocks.Block, _: Stand) -> None:
    """Folders of the checkout."""
    folders = [name for line in block.text.splitlines() for name in [line.split()[0].rstrip(",")]]
    assert len(folders) == 5 and all(list(tree.ROOT.glob(name)) for name in folders)


def files(folder: str, *sometimes: str) -> Check:
    """Files of a run: there, or in the source where they are only written now and then."""

    def check(block: blocks.Block, made: Stand) -> None:
        for name in names(block):
            pattern = re.sub(r"\b(STEP|N)\b", "*", name.rstrip("/"))
            there = list((made.folder / folder).glob(pattern))
            assert there or (name in sometimes and name.rpartition("/")[2] in texts()), f"{name} is not in {folder}"

    return check


def stages(block: blocks.Block, _: Stand) -> None:
    """Folders of the demo: its stages, and files whose names stand in the source."""
    recipe = shipped_recipes.get_recipe("demo").path.read_text(encoding="utf-8")
    for name in names(block):
        bare = name.rstrip("/").rpartition("/")[2].partition(":")[0]
        assert re.search(rf"^  {bare}:", recipe, re.M) or bare in texts(), name


def rooms(block: blocks.Block, _: Stand) -> None:
    """The rooms of the house, from the top down, as import-linter holds them."""
    text = (tree.ROOT / "pyproject.toml").read_text("utf-8")
    layers = re.findall(r"^layers = \[\n(.*?)^\]", text, re.M | re.S)[0]
    level = {room: number for number, layer in enumerate(layers.splitlines()) for room in re.findall(r"\w+", layer)}
    drawn = [re.split(r"\s{2,}", line)[0].split(" | ") for line in block.text.splitlines()]
    flat = [room for row in drawn for room in row]
    assert sorted(flat) == sorted(level), set(flat) ^ set(level)
    assert [level[room] for room in flat] == sorted(level.values())


def machines(_: blocks.Block, made: Stand) -> None:
    """A file of machines."""
    assert [(host.name, host.slots) for host in hostfile.read_hostfile(made.folder / "hosts.txt")] == [
        ("192.168.1.10", 8),
        ("192.168.1.11", 8),
    ]


def other(_: str) -> Check:
    """Nothing of ours: the reason why it is not run."""
    return lambda block, made: None


@dataclass(frozen=True)
class Row:
    """A block of text and what is held against it."""

    page: str
    number: int
    check: Check


PLAN = "plan --chip 910B3 --npus 8 --"
LAYOUTS = "--data rows.jsonl --tuner lora --batch.seq-len 32768 --batch.global-batch-tokens 524288"
LONG = "--data rows.jsonl --batch.seq-len 2048 --batch.global-batch-tokens 4194304"
HOSTS = "node ms"
ROWS = (
    Row("README.md", 0, repository),
    Row("CONTRIBUTING.md", 0, rooms),
    Row("CONTRIBUTING.md", 1, written()),
    Row("concepts/architecture.md", 0, files("runs/mine/base", "bad_steps.jsonl")),
    Row("concepts/checkpoints.md", 0, written("MiB")),
    Row("concepts/checkpoints.md", 1, written()),
    Row("concepts/checkpoints.md", 2, written("GiB pretrain distcp zero")),
    Row("concepts/devices.md", 0, written()),
    Row("guides/bench.md", 0, written("Intel Xeon Processor MiB pretrain model depth tokenizer synthetic batch")),
    Row("guides/bench.md", 1, written()),
    Row("guides/data.md", 0, written("frage antwort query response instruction input output messages MiB KiB")),
    Row("guides/data.md", 1, written("context score rows")),
    Row("guides/data.md", 2, written("corpus train")),
    Row("guides/data.md", 3, written("asistant")),
    Row("guides/demo.md", 0, stages),
    Row("guides/doctor.md", 0, written("Ascend davinci")),
    Row("guides/evaluation.md", 0, said("eval runs/mine/base --tasks arc_easy --tasks-from datasets")),
    Row("guides/explain.md", 0, said("explain runs/mine", "and the following")),
    Row("guides/export.md", 0, other("starts vLLM on an NPU; tests/unit/export/test_serving.py runs the script")),
    Row("guides/export.md", 1, other("needs Ollama; tests/unit/export/test_serving.py reads the Modelfile")),
    Row("guides/fine-tuning.md", 0, written("Which way does the wind blow Up slope im_start im_end user assistant")),
    Row("guides/launch-check.md", 0, written(HOSTS)),
    Row("guides/launch-check.md", 1, written("node rows.json")),
    Row("guides/launch-hosts.md", 0, machines),
    Row("guides/network.md", 0, other("the reader's shell makes a file in a home that machines share")),
    Row("guides/launch-hosts.md", 1, other("ssh-copy-id and ssh need machines; tests/cluster/test_sshd.py")),
    Row("guides/launch-hosts.md", 2, written()),
    Row("guides/launch-hosts.md", 3, written()),
    Row("guides/monitor.md", 0, headings("ann python anabatic sft recipe.yaml")),
    Row("guides/plan.md", 0, said(f"{PLAN} sft --model Qwen/Qwen2.5-7B-Instruct --data rows.jsonl --tuner lora")),
    Row("guides/plan.md", 1, said(f"plan --layouts --npus 8 --nodes 2 -- sft --model Qwen/Qwen3-32B {LAYOUTS}")),
    Row("guides/plan.md", 2, said(f"plan --scale 4096 --tokens 2000000000 -- sft --model Qwen/Qwen2.5-0.5B {LONG}")),
    Row("guides/plan.md", 3, written()),
    Row("guides/ray.md", 0, written("RayNode pid latest session worker tmp")),
    Row("guides/survival.md", 0, written("rank INFO")),
    Row("guides/survival.md", 1, written("node npu")),
    Row("guides/survival.md", 2, written("node npu layers mlp up_proj weight")),
    Row("guides/vessels.md", 0, files("runs/vessel/best_model", "forest.safetensors", "vessel_forest.safetensors")),
    *(Row("reference/cli.md", number, other("written by scripts/gen_reference.py, compared with it by tests/house"))
      for number in range(47)),
)  # fmt: skip


def row(block: blocks.Block) -> Row | None:
    """Return the row of a block; None where there is none."""
    page = "/".join(block.page.relative_to(tree.ROOT).parts[-2:])
    return next((one for one in ROWS if (one.page, one.number) == (page, block.number)), None)


SHOWN = [block for page in blocks.ENGLISH for block in blocks.blocks(page) if block.language == "text"]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_shown(block: blocks.Block, stand: Stand) -> None:
    found = row(block)
    assert found is not None, f"{block.name}: say in ROWS what it is held against"
    found.check(block, stand)


def test_words_that_nobody_says() -> None:
    """The check itself: numbers, paths and names are left out, changed words are found."""
    line = "saved runs/mine/base/checkpoint-400 in 1.7s, in the background; the training waited 116 ms"
    assert fragments(line, frozenset({"ms"})) == ["saved", "in the background", "the training waited"]
    assert "the training waited" in texts() and "the training slept" not in texts()
