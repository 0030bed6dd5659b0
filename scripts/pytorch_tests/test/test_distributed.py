"""The tests of collectives and DDP that the torch wheel ships, on the backend hccl: torch_npu's transfer_to_npu makes
`torch.npu` and `hccl` of their `torch.cuda` and `nccl`.
"""

from __future__ import annotations

import importlib
import os
import tempfile

os.environ.update(BACKEND="nccl", WORLD_SIZE="2", TEMP_DIR=tempfile.mkdtemp())

import torch
import torch_npu
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

CPU_ACTIVITY = torch.profiler.ProfilerActivity.CPU
importlib.import_module("torch_npu.contrib.transfer_to_npu")  # patches torch.cuda
torch.profiler.ProfilerActivity.CPU = CPU_ACTIVITY  # the tests profile with torch's own profiler
common_distributed.TEST_CUDA = True  # what skips tests without a GPU; set earlier, it asks for NCCL's version
assert torch_npu.npu.is_available() and torch.distributed.is_available()


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    """All of them, over two processes."""

    def setUp(self) -> None:
        """Fork the ranks: this process has not used a device yet."""
        super().setUp()
        common_distributed.initialize_temp_directories()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
