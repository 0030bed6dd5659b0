"""Write tables of guides in both languages (of `plan.py`, `plan_beside.py`, `plan_published.py`, `npu_budget.py`).

A table stands between `<!-- NAME: the command -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from option_types import parts_of

GUIDE = "docs/{}/guides/{}.md"
ROOT = Path(__file__).parents[1]
CHINESE = (
    ("| layout | NPUs | tokens |", "| 布局 | NPU 数 | token |"),
    (", stage 1 of 2", "，第 1 阶段，共 2 个"),
    (", stage 2 of 2", "，第 2 阶段，共 2 个"),
    ("pipeline 2 of 2 chunks", "pipeline 2，每阶段 2 段"),
    ("the last block's backward pass", "最后一个块的反向"),
    ("the first block's backward pass", "第一个块的反向"),
    ("the embedding's gradient", "嵌入的梯度"),
    ("the experts' gradients", "专家的梯度"),
    ("the loss", "损失"),
    ("the update", "更新"),
    ("few tokens", "少量 token"),
    (" tokens", " token"),
    (" words", " 词"),
    ("two micro-batches", "两个微批次"),
    ("two blocks", "两个块"),
    ("saved in the background", "后台保存"),
    ("saved model", "保存的模型"),
    ("tokenised data", "分词后的数据"),
    ("checkpoint", "检查点"),
    ("host memory", "主机内存"),
    ("setting", "设置"),
    ("measured", "实测"),
    ("planned", "预测"),
    ("highest at", "峰值出现在"),
    ("recompute none", "不重计算"),
    ("recompute selective", "选择性重计算"),
    ("recompute full", "全部重计算"),
    ("does not fit", "放不下"),
    ("micro-batch", "微批次"),
    ("GiB of a device", "每个设备的 GiB"),
    (" points", " 差（百分点）"),
    ("published", "公布值"),
    ("formula", "公式"),
    ("documented", "按文档"),
    ("here", "本项目"),
    ("operators", "算子"),
    ("host waits", "主机等待"),
    ("peak MiB", "峰值 MiB"),
    ("collectives", "集合通信"),
    ("sent MiB", "发送 MiB"),
    ("at least", "理论最少"),
    ("packed", "打包"),
    ("others", "其他"),
    ("experts, ", "专家，"),
    ("8 ranks", "8 个 rank"),
    ("NPUs", "个 NPU"),
    ("job", "任务"),
    ("what", "内容"),
    (" way ", " 方式 "),
    (" to ", " 对 "),
)


def parser(text: str | None, device: str, rows: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options that programs with rows share; `device` is where they measure unless told.

    `only` of what is parsed holds names of rows.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", type=parts_of(rows), default=rows, help="parts of names, with commas between them")
    made.add_argument("--device", choices=("npu", "cpu"), default=device)
    made.add_argument("--docs", action="store_true", help="write the table into the guides")
    return made


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def chinese(text: str) -> str:
    """Return a table in the words of the Chinese guide."""
    for ours, theirs in CHINESE:
        text = text.replace(ours, theirs)
    return text


def _find(name: str) -> re.Pattern[str]:
    """Return the pattern of a table's place; its second group is the table."""
    return re.compile(rf"(<!-- {name}: [^>]*-->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


def merge(name: str, names: Sequence[str], rows: Sequence[Sequence[str]], guide: str = "plan") -> list[Sequence[str]]:
    """Return rows in the order of `names`, their first cells; missing rows and cells are taken from the guide."""
    found = _find(name).search((ROOT / GUIDE.format("en", guide)).read_text())
    lines = found[2].splitlines()[2:] if found else []
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    known: dict[str, Sequence[str]] = {row[0]: row for row in old}
    for row in rows:
        before = known.get(row[0], ["-"] * len(row))
        known[row[0]] = [cell or kept for cell, kept in zip(row, before, strict=True)]
    return [known[each] for each in names if each in known]


def write(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], guide: str = "plan") -> None:
    """Put a table into a guide, in both languages."""
    made = table(head, rows)
    for language, text in (("en", made), ("zh", chinese(made))):
        file = ROOT / GUIDE.format(language, guide)
        found, count = _find(name).subn(lambda match, text=text: f"{match[1]}{text}{match[3]}", file.read_text())
        if count != 1:
            raise SystemExit(f"{file} has {count} places for {name}")
        file.write_text(found)
