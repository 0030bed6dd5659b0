"""Write docs/*/reference/errors.md: every error that the code raises, with its hint, read from the source itself.

usage: python scripts/gen_errors.py [--check]     --check only says whether the pages are current

Parts of a message that are known only when it happens stand as `…`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from anabatic.core import errors

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "src" / "anabatic"
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.AnabaticError) and kind is not errors.AnabaticError
}
OPEN = "…"
PAGES = {
    "en": (
        "# Errors",
        "What `error:` and `hint:` can say, room by room as in [Architecture](../concepts/architecture.md).\n"
        "`…` stands for what is known only when it happens. The exit code is the kind's. Errors of other\n"
        "programs (CANN, HCCL, torch_npu, the driver): [Explaining errors](../guides/explain.md).",
        "| error | hint |",
        "Exit code",
    ),
    "zh": (
        "# 错误",
        "`error:` 和 `hint:` 的全部信息，按[架构](../concepts/architecture.md)中的模块排列。"
        "`…` 代表运行时才能确定的内容。退出码由错误类型决定。"
        "其他程序（CANN、HCCL、torch_npu、驱动）的错误见[解释错误](../guides/explain.md)。信息本身为英文。",
        "| 错误 | 提示 |",
        "退出码",
    ),
}


class Row(NamedTuple):
    """One error in the source."""

    kind: str
    message: str
    hint: str


def text(node: ast.expr | None) -> str:
    """What an expression says, as far as the source tells."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else OPEN
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) if isinstance(part, ast.Constant) else OPEN for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(dict.fromkeys(filter(None, (text(node.body), text(node.orelse)))))
    return OPEN


def rows(path: Path) -> Iterator[Row]:
    """The errors made in a file, in their order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda one: one.lineno):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in KINDS or not call.args:
            continue
        keywords = {word.arg: word.value for word in call.keywords}
        hint = call.args[1] if len(call.args) > 1 else keywords.get("hint")
        message = text(call.args[0])
        if message.strip(f"{OPEN}: "):
            yield Row(name, message, text(hint))


def page(code: str) -> str:
    """The whole page in one language."""
    title, about, head, exit_code = PAGES[code]
    lines = [title, "", "<!-- Written by scripts/gen_errors.py (make reference); do not edit. -->", "", about, ""]
    kinds = ", ".join(f"`{name}`: {kind.exit_code}" for name, kind in sorted(KINDS.items()))
    lines += [f"{exit_code}: {kinds}.", ""]
    for room in sorted(path for path in CODE.iterdir() if path.is_dir()):
        found = sorted(
            {row for path in room.rglob("*.py") for row in rows(path)}, key=lambda row: (row.message.lower(), row)
        )
        if found:
            lines += [f"## {room.name}", "", head, "|---|---|"]
            lines += [f"| {_cell(row.message)} | {_cell(row.hint)} |" for row in found]
            lines.append("")
    return "\n".join(lines)


def _cell(words: str) -> str:
    plain = " ".join(words.split())
    for mark in ("\\", "|", "<", "*", "_", "[", "]", "`", "{", "}"):
        plain = plain.replace(mark, f"\\{mark}")
    return plain


def main() -> int:
    stale = []
    for code in PAGES:
        target = ROOT / "docs" / code / "reference" / "errors.md"
        new = page(code)
        if not target.exists() or target.read_text(encoding="utf-8") != new:
            stale.append(target.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv[1:]:
                target.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv[1:] else 'written'}: {', '.join(stale)}" if stale else "all current")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
