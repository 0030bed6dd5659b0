"""The YAML and JSON of the pages, in both languages, read by the code that reads them when a user writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from anabatic.config.loading import settings
from anabatic.data.readers.document import ColumnMapping, Document
from anabatic.data.readers.raw_rows import read_raw_rows as raw_rows
from anabatic.data.readers.row_parsing import row_to_document
from anabatic.data.vision.row_objects import place_objects, split_objects
from anabatic.doctor import knowledge_base
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.items import build_items
from anabatic.recipes.pipeline import stage_plan
from house import tree
from pages import blocks
from pages.stand import Stand

PAGES = [page for one in blocks.ENGLISH for page in (one, blocks.chinese(one)) if page is not None]
BLOCKS = [one for page in PAGES for one in blocks.blocks(page)]


def fine_tuning(file: Path) -> None:
    """A recipe of `sft`."""
    assert settings.load_job("sft", [file]).out


def curriculum(file: Path) -> None:
    """A part of a recipe; the page says that its stages are the defaults."""
    given, default = (
        settings.load_job("sft", files, {"model": "models/base", "data": {"train": ["rows.json"]}})
        for files in ([file], [])
    )
    assert given.curriculum.use and given.curriculum.stages == default.curriculum.stages


def rollouts(file: Path) -> None:
    """A part of a recipe of `rl`: a server, its addresses and the shared folder."""
    job = settings.load_job(
        "rl", [file], {"model": "models/base", "data": {"train": ["rows.json"]}, "rewards": ["answer"]}
    )
    assert job.rollout.engine == "vllm" and job.rollout.url and job.rollout.folder


def pipeline(file: Path) -> None:
    """A recipe of `run`."""
    job = settings.load_job("run", [file])
    assert [stage.name for stage in stage_plan.plan_stages(job, {"corpus": "data/books"})] == list(job.stages)


def knowledge_entries(file: Path) -> None:
    """Entries for `explain`, which take a code of ours."""
    assert knowledge_base.load_knowledge((file,)).by_code["EI0006"].id == "our-proxy"


def task(file: Path) -> None:
    """A task of `eval`: rows become questions."""
    for planned in registry.plan_tasks([str(file)]).tasks:
        rows = list(raw_rows(Path(planned.task.data.files[0])))
        shots = planned.task.shots
        made = build_items(planned.task, rows, None, shots=shots, limit=None, seed=0)
        assert len(made) == len(rows)


def group(file: Path) -> None:
    """A group of tasks."""
    plan = registry.plan_tasks([str(file)])
    assert len(plan.tasks) == 3 and len(plan.groups) == 1


def workflow(file: Path) -> None:
    """A workflow that calls our action: the folder is there, and it takes these inputs."""
    (step,) = (
        step for step in yaml.safe_load(file.read_text("utf-8"))["jobs"]["npu"]["steps"] if "anabatic" in step["uses"]
    )
    folder = tree.ROOT / step["uses"].removeprefix("OWNER/anabatic/").partition("@")[0]
    action = yaml.safe_load((folder / "action.yml").read_text("utf-8"))
    assert set(step["with"]) <= set(action["inputs"])


YAML: dict[tuple[str, int], Callable[[Path], None]] = {
    ("guides/explain.md", 0): knowledge_entries,
    ("guides/fine-tuning.md", 0): curriculum,
    ("guides/kubernetes.md", 0): fine_tuning,
    ("guides/migration.md", 0): fine_tuning,
    ("guides/pipelines.md", 0): pipeline,
    ("guides/rl.md", 0): rollouts,
    ("guides/tasks.md", 0): task,
    ("guides/tasks.md", 1): task,
    ("guides/tasks.md", 2): group,
    ("guides/test-your-project.md", 0): workflow,
}
"""Page and number of the block -> who reads it."""


def place(block: blocks.Block) -> tuple[str, int]:
    return "/".join(block.page.parts[-2:]), block.number


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "yaml"], ids=lambda one: one.name)
def test_yaml(block: blocks.Block, stand: Stand) -> None:
    os.chdir(stand.folder)
    file = Path("shown.yaml")
    file.write_text(block.text, encoding="utf-8")
    YAML[place(block)](file)


def row(text: str) -> None:
    """A row of training data."""
    read = row_to_document(json.loads(text), "row", "row 1", ColumnMapping())
    assert isinstance(read, Document) and read.messages and read.messages[-1]["role"] == "assistant"


def seen_row(text: str) -> None:
    """A row of training data with a picture."""
    read = row_to_document(json.loads(text), "row", "row 1", ColumnMapping(media_folder="/pictures"))
    assert isinstance(read, Document) and read.pictures == ("/pictures/kite.jpg",)


def moving_row(text: str) -> None:
    """A row of training data with a video of listed frames."""
    read = row_to_document(json.loads(text), "row", "row 1", ColumnMapping(media_folder="/pictures"))
    assert isinstance(read, Document) and read.pictures[0].count("/pictures/f") == 4


def found_row(text: str) -> None:
    """A row of training data with names and places of what its picture shows."""
    read = row_to_document(json.loads(text), "row", "row 1", ColumnMapping(media_folder="/pictures"))
    assert isinstance(read, Document) and read.messages is not None
    objects = split_objects(read.pictures)[1]
    assert place_objects(read.messages, objects, "row") == read.messages and objects is not None


def answer(text: str) -> None:
    """A row that `infer` writes: all its columns, and no others."""
    from anabatic.recipes import answer_shards

    source = Path(answer_shards.__file__).parent
    written = (source / "batch_inference.py").read_text("utf-8") + Path(answer_shards.__file__).read_text("utf-8")
    assert all(f'"{key}"' in written for key in json.loads(text))


def asked(text: str) -> None:
    """The body of a request; the page's curl sends it (pages/test_commands.py)."""
    assert json.loads(text)["messages"]


def tools(text: str) -> None:
    """The field of the chat page; the page sends it with every question."""
    from anabatic.infer.server.request_schema import ChatRequest

    ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": json.loads(text)})


JSON = {
    ("guides/chat.md", 0): row,
    ("guides/data.md", 0): row,
    ("guides/dpo.md", 0): asked,
    ("guides/inference.md", 0): answer,
    ("guides/vision.md", 0): seen_row,
    ("guides/vision.md", 1): moving_row,
    ("guides/vision.md", 2): found_row,
    ("guides/web.md", 0): tools,
}
"""Page and number of the block -> who reads it."""


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "json"], ids=lambda one: one.name)
def test_json(block: blocks.Block) -> None:
    JSON[place(block)](block.text)
