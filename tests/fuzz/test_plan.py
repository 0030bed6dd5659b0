"""`anabatic plan` with descriptions of models that are wrong in one place: a plan, or an error with a hint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from anabatic.cli.app import main
from anabatic.core.errors import AnabaticError
from anabatic.device.table import find_chip
from anabatic.plan import memory_estimate, model_shape, step_time
from anabatic.plan.cost_model import get_chip_rates
from anabatic.plan.training_setup import TrainingSetup
from fuzz.plan_readers import MODELS, change_every_key, get_config

_CHIP = find_chip("Ascend910B3")
assert _CHIP is not None
RATES = get_chip_rates(_CHIP)


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_a_family_is_checked(name: str, tmp_path: Path) -> None:
    """Each key missing, zero, negative, huge or of another type: the sizes of the model are finite, or the error names
    the file, fits on a screen and has a hint."""
    file, faults = tmp_path / "config.json", []
    for what, config in change_every_key(get_config(name)):
        file.write_text(json.dumps(config))
        try:
            shape, _ = model_shape.get_named_shape(str(tmp_path))
            for setup in (TrainingSetup(shape), TrainingSetup(shape, "zero3", 8, tuner="lora", recompute="selective")):
                total = memory_estimate.estimate_peak_memory(setup).total
                seconds = step_time.estimate_step_time(setup, RATES).total_seconds
                if not (math.isfinite(total) and math.isfinite(seconds) and total > 0 and seconds > 0):
                    faults.append(f"{what}: {total} bytes, {seconds} s")
        except AnabaticError as error:
            if not error.hint or len(str(error)) > 500:
                faults.append(f"{what}: {error}")
        except Exception as error:  # of any kind: what is tested is that there is none
            faults.append(f"{what}: {error!r}")
    assert not faults, "\n".join(faults)


def run_plan(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--npus", "8", "--", "sft", "--model", str(folder), "--data", "rows.jsonl"])
    return int(caught.value.code or 0), capsys.readouterr().err


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "torn": json.dumps(get_config("deepseek-v3")).encode()[:200],
    "null": b"null",
    "a list": b"[1, 2]",
    "a number": b"1e999",
    "UTF-16": json.dumps(get_config("gpt-oss-20b")).encode("utf-16"),
    "zero bytes": b"\0" * 500,
    "deep lists": b'{"layer_types": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"text_config": ' * 50_000 + b"1" + b"}" * 50_000,
    "text_config in itself": b'{"model_type": "qwen3_5", "vision_config": {}, "text_config": ' * 60 + b"{}" + b"}" * 60,
    "a million keys": b"{" + b",".join(b'"k%d":1' % number for number in range(200_000)) + b"}",
    "a huge number": b'{"hidden_size": ' + b"9" * 100_000 + b"}",
    "twice the key": b'{"model_type": "qwen3", "model_type": ["qwen3"], "hidden_size": {}}',
    "escapes": b'{"model_type": "\\u001b[31m\\ud800", "hidden_size": "\\u202e"}',
    "a billion blocks": json.dumps({**get_config("qwen2.5-7b"), "num_hidden_layers": 10**9}).encode(),
    "a billion blocks of kinds": json.dumps({**get_config("kimi-linear-48b-a3b"), "num_hidden_layers": 10**9}).encode(),
    "a type that is a list": json.dumps({**get_config("llama-3.1-8b"), "model_type": ["llama"] * 300}).encode(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_descriptions(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command: exit code 2, one error with a hint, no traceback; a model_type of another type is no known
    family, and the plan of a large model does not fit."""
    (tmp_path / "config.json").write_bytes(HOSTILE[kind])
    code, errors = run_plan(capsys, tmp_path)
    if kind == "a type that is a list":
        assert code in (0, 1) and "error" not in errors
        return
    assert code == 2, errors
    assert "hint: " in errors and "Traceback" not in errors and "unexpected" not in errors
    assert len(errors) < 2000


def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").mkdir()
    code, errors = run_plan(capsys, tmp_path)
    assert code == 2 and "has no config.json" in errors
