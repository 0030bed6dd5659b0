"""`npu-smi` on the PATH sees what programs do."""

from __future__ import annotations

import re

from npu_sim.conftest import Sim


def test_memory_process_and_utilisation_are_live(sim: Sim) -> None:
    said = sim.python(
        """
        import os, re, subprocess, threading, time, torch
        held = torch.empty(512 << 20, dtype=torch.uint8, device="npu:1")
        x = torch.ones(1024, 1024, device="npu:1")
        done = threading.Event()
        def work():
            y = x
            while not done.is_set():
                y = y @ x
        thread = threading.Thread(target=work)
        thread.start()
        print(os.getpid())
        names = [name for name in os.environ if name.startswith("ANABATIC_")]
        bare = {name: os.environ[name] for name in [*names, "PATH"]}
        for _ in range(100):  # until the work shows
            time.sleep(0.3)
            table = subprocess.run("npu-smi info", shell=True, capture_output=True, text=True, env=bare).stdout
            used = re.search(r"\\| 1     910B3.*\\n\\| 0 +\\| \\S+ +\\| (\\d+)", table)
            if used and int(used[1]) > 20:
                break
        print(table)
        done.set()
        thread.join()
        """,
        npus=2,
    )
    pid, _, table = said.partition("\n")
    second = re.search(r"\| 1     910B3.*\n\| 0 +\| \S+ +\| (\d+) +0    / 0 +(\d+) *\/ 65536", table)
    assert second is not None, table
    assert int(second[1]) > 20
    assert 512 <= int(second[2]) < 600
    assert re.search(rf"\| 1 +0 +\| {pid} +\| python", table)
    assert "No running processes found in NPU 0" in table


def test_it_starts_fast(sim: Sim) -> None:
    spent = float(
        sim.python(
            """
            import resource, subprocess
            subprocess.run(["npu-smi", "info", "-l"], check=True, capture_output=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(used.ru_utime + used.ru_stime)
            """
        )
    )
    assert spent < 0.5  # a tenth of that on an idle machine
