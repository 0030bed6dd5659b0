"""`make test-changed`: imports, texts in tables and words of commands lead from a changed file to its tests."""

from __future__ import annotations

import pytest

from suite import changed

pytestmark = pytest.mark.process  # the graph of all imports takes seconds


@pytest.fixture(scope="module")
def graph() -> changed.TestGraph:
    return changed.TestGraph()


AFFECTED = {
    "imported": (
        "src/anabatic/infer/server/response_builder.py",
        {"tests/unit/infer/server/test_answers.py", "tests/browser/test_web_pages.py"},
        {"tests/unit/vessels/test_track_words.py", "tests/e2e/test_dpo.py", "tests/cluster/test_slurm.py"},
    ),
    "named in a table": (
        "src/anabatic/recipes/training/dpo.py",
        {"tests/e2e/test_dpo.py", "tests/e2e/test_context.py"},
        {"tests/e2e/test_minutes.py", "tests/unit/data/test_packing.py"},
    ),
    "what the shared home is made with": (
        "src/anabatic/recipes/tokenizer_commands.py",
        {"tests/e2e/test_dpo.py", "tests/smoke/test_commands.py"},
        {"tests/unit/infer/test_engine.py"},
    ),
    "of a guest": (
        "src/anabatic_vessels/io/nmea.py",
        {"tests/unit/vessels/test_tables.py", "tests/e2e/test_classify.py"},
        {"tests/unit/data/test_packing.py", "tests/e2e/test_dpo.py"},
    ),
    "a helper of tests": (
        "tests/e2e/home.py",
        {"tests/e2e/test_dpo.py", "tests/npu_sim/again/test_again_dpo.py", "tests/smoke/test_train.py"},
        {"tests/unit/data/test_packing.py", "tests/browser/test_chat_page.py"},
    ),
    "not Python": (
        "src/anabatic/infer/web/chat.js",
        {"tests/browser/test_web_pages.py"},
        {"tests/unit/vessels/test_track_words.py"},
    ),
    "a page": ("docs/en/guides/demo.md", {"tests/house/test_docs.py"}, {"tests/unit/data/test_packing.py"}),
}


@pytest.mark.parametrize("case", AFFECTED)
def test_who_is_affected(graph: changed.TestGraph, case: str) -> None:
    name, found, spared = AFFECTED[case]
    affected = set(graph.find_affected([name]))
    assert found <= affected, found - affected
    assert not spared & affected


def test_settings_of_the_tests_affect_all_of_them(graph: changed.TestGraph) -> None:
    names = [changed._relative(path) for path in changed.TESTS.rglob("test_*.py")]
    assert sorted(graph.find_affected(["tests/groups.toml"])) == sorted(names)


def test_a_leaf_affects_few_and_the_ground_floor_most(graph: changed.TestGraph) -> None:
    leaf, ground = (
        changed.split_quick(graph.find_affected([f"src/anabatic/{name}"]))[0]
        for name in ("recipes/export/model_card.py", "core/paths.py")
    )
    assert len(leaf) < 40 and len(ground) > 5 * len(leaf)
