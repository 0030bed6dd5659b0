"""Run PyTorch's own samples (operators, modules, optimizers) and its distributed tests on simulated NPUs.

python scripts/pytorch_tests.py --most 0           # all; goes on where it was stopped
python scripts/pytorch_tests.py --docs             # also rewrite docs/{en,zh}/concepts/sim-fidelity.md

The samples are those of torch.testing._internal in the installed torch; pytorch_tests/ compares with the CPU.
"""

from __future__ import annotations

import sim_suite

SUITE = sim_suite.Suite(
    "pytorch-tests",
    "scripts/pytorch_tests.py",
    __doc__,
    sim_suite.ROOT / "scripts" / "pytorch_tests",
    "a folder with a folder test",
)

if __name__ == "__main__":
    raise SystemExit(sim_suite.run_suite(SUITE))
