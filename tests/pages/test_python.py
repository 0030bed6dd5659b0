"""The Python of the pages runs: a page's blocks one after the other, with what the page says is there already."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from pages import blocks, visit
from pages.stand import Stand

ELSEWHERE = {
    "docs/en/guides/serving.md": "tests/unit/infer/server/test_guide_requests.py, before a server",
    "docs/en/guides/test-your-project.md": "tests/npu_sim/test_pytest_plugin.py, as a project of its own",
    "docs/en/reference/python.md": "tests/unit/cli/test_python_page.py",
}
"""Page -> the test that runs its blocks."""
CHECKED = """
prompt = "def has_close_elements(numbers, threshold):\\n"
completion = "    return min(abs(a - b) for a in numbers for b in numbers if a is not b) < threshold\\n"
test = "def check(candidate):\\n    assert candidate([1.0, 1.1], 0.5) and not candidate([1.0, 3.0], 0.5)\\n"
"""
LOADED = """
from anabatic.config.sections.common import DeviceSettings
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.device.device import select_device
from anabatic.models.pretrained import load_model
_device = select_device(DeviceSettings())
tokenizer, model = load_tokenizer("models/base"), load_model("models/base", _device.torch_device, _device.dtype)
prompt_ids = tokenizer.encode("the wind moves")
"""
BEFORE = {"concepts/sandbox": CHECKED, "guides/inference": LOADED}
"""Page -> what it takes for granted."""
AFTER: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "concepts/sandbox": lambda made, _: made["passed"],
    "guides/chat": lambda made, _: made["model"].config.num_hidden_layers == 2,
    "guides/dpo": lambda made, _: made["reward"].isfinite().item(),
    "guides/inference": lambda made, said: bool(made["request"].ids),
    "guides/rewards": lambda made, _: (
        made["polite"]("Please, continue", {}) == 1.0
        and made["near"]("It is 4", {"answer": "4"}) == 1.0
        and made["near"]("none", {"answer": "4"}) == 0.0
        and made["turn"]([{}, {}], {}) == "Are you sure?"
        and made["turn"]([{}] * 4, {}) is None
    ),
    "guides/tokenizer": lambda made, _: "Hello" in made["tokenizer"].decode(made["tokenizer"].encode("Hello")),
    "guides/vessels": lambda made, said: len(made["read"]) > 8 and "SPD" in said and "Cargo" in said,
}
"""Page -> what is true when its blocks have run: (names, what was printed)."""


def pages() -> list[Path]:
    return [page for page in blocks.ENGLISH if any(one.language == "python" for one in blocks.blocks(page))]


@pytest.mark.parametrize("page", pages(), ids=visit.title)
def test_python_of_a_page(page: Path, stand: Stand) -> None:
    name = visit.title(page)
    if blocks.tree.name(page) in ELSEWHERE:
        pytest.skip(ELSEWHERE[blocks.tree.name(page)])
    os.chdir(stand.folder)
    made: dict[str, Any] = {"__name__": "page"}
    exec(compile(BEFORE.get(name, ""), f"before {name}", "exec"), made)
    said = io.StringIO()
    with redirect_stdout(said):
        for block in blocks.blocks(page):
            if block.language == "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), made)
    sys.stdout.write(said.getvalue())
    assert AFTER[name](made, said.getvalue())
