"""Operators that extensions of others call in CANN's library by name, without torch_npu's dispatcher."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim

INVALID = 161002  # ACLNN_ERR_PARAM_INVALID


def test_rotary_embedding_follows_its_formula(sim: Sim) -> None:
    told = json.loads(sim.program("aclnn_rotary.py").splitlines()[-1])
    assert max(max(row) for row in told["torch.float32"]) < 1e-5
    assert max(max(row) for row in told["torch.bfloat16"]) < 0.1  # of sums up to 12 values: half a step at 8 is 0.03
    assert told["refused"] == [INVALID] * 5


def test_an_extension_finds_the_libraries_to_link_against(sim: Sim) -> None:
    told = sim.python(
        """
        import os, subprocess
        code = "int aclrtGetDevice(int*); int device(int* number) { return aclrtGetDevice(number); }"
        open("extension.c", "w").write(code)
        folder = os.path.join(os.environ["ASCEND_HOME_PATH"], "lib64")
        words = ["gcc", "-shared", "-fPIC", "extension.c", "-Wl,--no-undefined", "-L" + folder, "-lascendcl"]
        subprocess.run([*words, "-o", "extension.so"], check=True)
        import ctypes, torch
        torch.npu.set_device(0)
        number = ctypes.c_int(-1)
        print(ctypes.CDLL("./extension.so").device(ctypes.byref(number)), number.value)
        """
    )
    assert told.splitlines()[-1] == "0 0"
