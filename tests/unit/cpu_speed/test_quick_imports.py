"""transformers and torch's checkpoints as commands import them: nothing heavy, everything there when it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.process


HEAVY = """heavy = [name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "torch.distributed.fsdp", "sympy", "scipy.optimize") if name in sys.modules]
"""
"""Seconds of imports that one process on a processor does not need."""
IMPORT = "import json, sys\nfrom anabatic.cpu_speed import quick_imports\n"
QUICK = IMPORT + "quick_imports.install_quick_imports()\nimport transformers, transformers.modeling_utils\n"
GENERATE = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
config = Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8)
mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
tokens = Qwen3ForCausalLM(config).eval().generate(
    torch.tensor([[1, 2, 3], [0, 4, 5]]), attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0
).tolist()
"""
NAMES = """
names = sorted(set(dir(transformers)) | set(dir(transformers.models)))
try:
    from transformers.distributed import mixin
    styles = sorted(mixin.ALL_PARALLEL_STYLES)
except ImportError:
    styles = []
"""
RESOLVE = """
from anabatic.cpu_speed.quick_imports import DeferredName, resolve_name
modules = [each for name, each in list(sys.modules.items()) if name.startswith(("transformers.", "torch.distributed."))]
waiting = [(each, name, value) for each in modules for name, value in list(vars(each).items())
           if type(value) is DeferredName]
def is_real(found, module, name, *_): return found is getattr(sys.modules[module], name)
is_right = [is_real(resolve_name(value), *value._deferred) for *_, value in waiting]
left = [name for each, name, value in waiting if vars(each)[name] is value]
"""


def run(program: str, *shown: str) -> Any:
    """Run a program in an interpreter of its own and return the values of its names `shown`."""
    program += f"\nprint(json.dumps([{', '.join(shown)}]))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def usual() -> Any:
    """Names, styles and tokens of an ordinary import."""
    return run(
        "import json, transformers, transformers.modeling_utils\n" + GENERATE + NAMES, "names", "styles", "tokens"
    )


def test_everything_is_there_when_it_is_used_and_nothing_heavy_before(usual: Any) -> None:
    heavy, names, styles, tokens, count, is_right, left = run(
        QUICK
        + "quick_imports.import_checkpoints()\nfrom transformers import AutoModelForCausalLM, Qwen3ForCausalLM\n"
        + HEAVY
        + GENERATE
        + NAMES
        + RESOLVE,
        *("heavy", "names", "styles", "tokens", "len(waiting)", "all(is_right)", "left"),
    )
    assert heavy == []
    assert [names, styles, tokens] == usual
    assert count >= 5
    assert is_right
    assert left == []


def test_another_major_version_is_imported_as_usual() -> None:
    program = QUICK.replace("quick_imports.install", "quick_imports._KNOWN_MAJOR = '4'\nquick_imports.install", 1)
    assert "torch.distributed.tensor" in run(program + HEAVY, "*heavy")


def test_marks_for_the_compiler_are_made_when_it_is_imported() -> None:
    found = run(
        IMPORT
        + """
import torch
before = torch.compiler.disable
with quick_imports._record_dynamo_marks(torch):
    @torch.compiler.allow_in_graph
    def kept(x): return x
    @torch._dynamo.assume_constant_result
    def constant(): return 1
    @torch.compiler.disable
    def skipped(x): return x + 1
is_late = "torch._dynamo" not in sys.modules
is_restored = torch.compiler.disable is before
value = skipped(1)
from torch._dynamo import trace_rules
is_kept = trace_rules.is_callable_allowed(kept)
is_real = torch._dynamo is sys.modules["torch._dynamo"]
""",
        *("is_late", "is_restored", "value", "is_kept", "constant._dynamo_marked_constant", "is_real"),
    )
    assert found == [True, True, 2, True, True, True]
