"""Pages are written in standard technical terms: words to avoid, each with the word to use instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house import tree

DOCS = tree.ROOT / "docs"
GENERATED = (
    "reference/cli.md",
    "reference/config.md",
    "reference/errors.md",
    "reference/glossary.md",
    "reference/settings-that-matter.md",
)
"""Written by scripts from the texts of the program; the glossary quotes the words to avoid."""

READMES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
READMES_ZH = ("README.zh.md",)

# Patterns are narrow on purpose: normal use ("beside the point", "goes on sale", "it tells you") is not found.
ENGLISH = {
    r"\b(un)?mend(s|ed|ing)?\b": "fix",
    r"\baloud\b": "log, report",
    r"\bwhence\b|\bwhither\b": "from where, to where",
    r"\btells? (it |them |these |those )?apart\b|\btold apart\b": "distinguish",
    r"\b(is|are|was|were) told\b": "is reported, sees",
    r"\bnone sees\b|\bnobody else's\b": "write the sentence with a subject: no process sees ...",
    r"\bbeside (the |a |an |its |their )?(plan|baseline|theory|chance|gzip|trainer|one\b|trl|transformers|nanochat)":
        "compared with",
    r"\bmeasured beside\b|\bbeside (it|them) in every\b": "compared with",
    r"\b(training|run|job|command) goes on\b|\bgoes on (as|in|where|with|from)\b": "resumes, continues",
    r"\blearned tokens?\b|\btokens? (that )?(is|are) learned\b": "target tokens",
    r"\b(un)?parted\b": "split",
    r"\b(is|are|was|were|be) passed over\b|\bpasses over (rows?|documents?|it|them)\b": "skip",
    r"\bon paper\b": "predicted, estimated",
    r"\bhand (it|them) on\b|\bhands \S+ on to\b": "export, forward",
    r"\b(file|line|word|answer|text|row|model|tensor|folder)s? (stand|stands|lie|lies) "
    r"(in|on|at|behind|above|below|beside)\b": "is in, is at",
    r"\bin one pass over\b|\bonce a pass\b|\ba pass over the data\b": "epoch",
    r"\bread anew\b|\bstart(s|ed)? anew\b|\bcompiled anew\b|\bdrawn anew\b": "again",
    r"\bno list of \w+ grows old\b": "no list has to be maintained",
    r"\bof (ours|yours) alone\b|\bby root alone\b": "only",
    r"\bshut in\b|\bkept in\b(?! (the|a|an|its|memory|order|sync|one|bf16|fp16|fp32))": "isolated",
    r"\b(least|most) is (sent|kept|read)\b": "sends the least",
    r"\bways in\b(?= are\b)": "entry points",
    r"\b[Nn]obody reads it\b": "no program reads it",
    r"\ball the same\b": "anyway, still",
    r"\ba talk\b": "a conversation",
    r"\bforetells?\b|\bforetold\b": "predict",
    r"\bleaves? the house\b": "share",
}  # fmt: skip
"""Pattern of a word or phrase -> the standard term."""

CHINESE = {
    r"您": "你, or no pronoun",
    r"纸上": "预估",
    r"悄悄": "没有提示",
    r"说出来|大声": "记录到日志",
    r"坏步": "异常步",
    r"两边都看": "双向",
    r"不设防": "不隔离",
    r"遮住": "掩码",
    r"一遍之中|每行每遍|第几遍": "epoch",
    r"的一生": "生命周期",
    r"学习的 token 数": "目标 token 数",
    r"留出的?指标": "验证指标",
    r"词元": "token",
    r"暗中的": "隐式",
    r"一个旋钮": "主要参数",
    r"读自": "来自 ... 源码",
    r"看看检查点(?!\})": "查看检查点",
    r"走了后门": "间接",
    r"不算数": "会被忽略",
    r"从不说出": "从不预测",
}
"""Pattern of a literal translation -> what an engineer writes."""

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[ \t]*$", re.M | re.S)
NOT_PROSE = re.compile(r"`[^`\n]*`|!\[[^\]]*\]|\]\([^)\s]*\)|\{#[^}]*\}|<!--.*?-->", re.S)


def prose(text: str) -> str:
    """Return the text of a page with code, link targets, alt texts and comments blanked; lines keep their numbers."""
    for pattern in (FENCE, NOT_PROSE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def words_to_avoid(text: str, terms: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return (line, words, what to use) of each hit; a phrase may cross a line end."""
    text = prose(text)
    flat = text.replace("\n", " ")
    return sorted(
        (text.count("\n", 0, match.start()) + 1, match[0], standard)
        for pattern, standard in terms.items()
        for match in re.finditer(pattern, flat, re.I)
    )


def pages(code: str) -> list[Path]:
    """Return the hand-written pages of a language."""
    folder = DOCS / code
    files = [tree.ROOT / name for name in (READMES if code == "en" else READMES_ZH)]
    return files + [page for page in folder.rglob("*.md") if page.relative_to(folder).as_posix() not in GENERATED]


PACKAGE = tree.ROOT / "src" / "anabatic"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")


def texts_of_the_program(folder: Path) -> list[Path]:
    """Return the sources: their docstrings are the reference, their messages what users read."""
    return [path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)]


TERMS = {"en": ENGLISH, "zh": CHINESE}


def find_words(paths: list[Path], terms: dict[str, str]) -> str:
    """Return a line for each word to avoid."""
    return "\n".join(
        f"{tree.name(page)}:{line}: {words!r}: use {standard}"
        for page in sorted(paths)
        for line, words, standard in words_to_avoid(page.read_text(encoding="utf-8"), terms)
    )


@pytest.mark.parametrize("code", TERMS)
def test_pages_use_standard_terms(code: str) -> None:
    wrong = find_words(pages(code), TERMS[code])
    assert not wrong, wrong


@pytest.mark.parametrize("room", ROOMS)
def test_the_program_uses_standard_terms(room: str) -> None:
    wrong = find_words(texts_of_the_program(PACKAGE / room), ENGLISH)
    assert not wrong, wrong


def test_the_top_of_the_program_uses_standard_terms() -> None:
    wrong = find_words(sorted(PACKAGE.glob("*.py")), ENGLISH)
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "The command that mends it."),
        ("en", "How they are told\napart."),
        ("en", "Loss beside the plan."),
        ("en", "The learned tokens."),
        ("zh", "在您的机器上运行。"),
        ("zh", "纸上的任务。"),
    ],
)
def test_words_are_found(code: str, text: str) -> None:
    assert words_to_avoid(text, TERMS[code])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "We recommend an amendment; the switch goes on sale beside the river, and it tells you the price."),
        ("en", "A file stands out. The pass over the bridge is open. Training continues after the last step."),
        ("en", "```text\nthe command that mends it\n```\nUse `on paper` and [this](a.md#on-paper)."),
        ("zh", "你可以查看检查点，并把训练日志写入文件。"),
    ],
)
def test_normal_use_is_not_found(code: str, text: str) -> None:
    assert not words_to_avoid(text, TERMS[code])
