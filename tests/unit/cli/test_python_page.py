"""The blocks of docs/en/reference/python.md run one after the other, as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model

pytestmark = pytest.mark.process


PAGE = Path(__file__).parents[3] / "docs" / "en" / "reference" / "python.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_chat_model(tmp_path, max_position_embeddings=1024)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), found)
    assert found["run"].is_finished and isinstance(found["answer"], str) and len(found["losses"]) == 2
    assert found["request"].ids
    assert "error" not in capsys.readouterr().out
