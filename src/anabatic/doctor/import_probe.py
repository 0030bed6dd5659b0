"""What `import torch` does here, tried in a child: it may fail, crash or hang, and it loads any torch_npu it finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from anabatic.core import json_reader
from anabatic.doctor import subprocess_runner

_LINE_MARK = "anabatic-probe:"
_PROBE_SCRIPT = """
import json, os, sys
def say(**told):
    sys.__stdout__.write("\\n" + sys.argv[1] + json.dumps(told) + "\\n")
    sys.__stdout__.flush()
def trouble(error):
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__
    return type(error).__name__ + ": " + " ".join(str(error).split())[:500]
stage = "torch"
try:
    import torch
    say(stage=stage, torch=torch.__version__, cuda=torch.version.cuda)
    if "npu" in sys.argv[2:]:
        stage = "torch_npu"
        import torch_npu
        say(stage=stage, torch_npu=torch_npu.__version__)
        stage = "device"
        sys.stdin.read()
        count = torch.npu.device_count() if torch.npu.is_available() else 0
        say(stage=stage, npus=count, name=torch.npu.get_device_name(0) if count else "")
    elif "cuda" in sys.argv[2:]:
        stage = "device"
        sys.stdin.read()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        say(stage=stage, gpus=count, name=torch.cuda.get_device_name(0) if count else "")
    say(stage="done")
except BaseException as error:
    say(stage=stage, error=trouble(error))
sys.stdout.flush()
os._exit(0)
"""


def run_import_probe(
    parts: list[str], seconds: float, variables: Mapping[str, str], gate: int | None = None
) -> dict[str, Any]:
    """Import torch (and `parts`: `npu` or `cuda`) in a child; return what it told, merged.

    Without autoload: torch's own import and torch_npu's then fail apart. Before it uses a device the child waits for
    the end of `gate`: it must not be among the processes that npu-smi lists. Keys: `stage` reached, `torch`, `cuda`,
    `torch_npu`, `npus` or `gpus`, `name`, `error`; `hung` or `signal` when it did not come to its end.
    """
    inner = {**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    output = subprocess_runner.run_program(
        [sys.executable, "-c", _PROBE_SCRIPT, _LINE_MARK, *parts], seconds, inner, gate or subprocess.DEVNULL
    )
    facts = parse_probe_output(output.text)
    if output.code is None:
        facts["hung"] = round(seconds)
    elif output.code < 0:
        facts["signal"] = -output.code
    elif facts.get("stage") != "done" and "error" not in facts:
        facts["error"] = output.text.strip().rpartition("\n")[2][:500] or f"exit code {output.code}"
    return facts


def parse_probe_output(text: str) -> dict[str, Any]:
    """Return what the marked lines of a child's output say, later ones over earlier ones."""
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(_LINE_MARK):
            try:
                row = json_reader.loads(line[len(_LINE_MARK) :])
            except ValueError:  # cut by the end of the process
                continue
            if isinstance(row, dict):
                facts.update(row)
    return facts
