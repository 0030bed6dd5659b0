"""Import vLLM with vllm-ascend's platform, then the operators that vllm-ascend brings compiled."""

from __future__ import annotations

import importlib

import vllm
import vllm_ascend
from vllm.platforms import current_platform


def main() -> None:
    """Print what is found, in the order in which it is imported."""
    print(f"vllm {vllm.__version__}, {vllm_ascend.__name__}", flush=True)
    print(f"platform {type(current_platform).__module__}: {current_platform.device_type}", flush=True)
    if current_platform.device_type != "npu":
        raise RuntimeError("vLLM has not found the NPU")
    operators = importlib.import_module("vllm_ascend.vllm_ascend_C")
    print(f"operators {operators.__file__}")


if __name__ == "__main__":
    main()
