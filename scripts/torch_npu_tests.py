"""Run torch_npu's own test files on simulated NPUs, and write the table of the docs.

python scripts/torch_npu_tests.py --tests DIR                 # DIR/test of Ascend/pytorch; goes on where it was stopped
python scripts/torch_npu_tests.py --tests DIR --only custom_ops/ --again failed
python scripts/torch_npu_tests.py --tests DIR --docs          # also rewrite docs/{en,zh}/concepts/sim-fidelity.md
"""

from __future__ import annotations

import sim_suite

SUITE = sim_suite.Suite(
    "torch-npu-tests",
    "scripts/torch_npu_tests.py",
    __doc__,
    sim_suite.ROOT.parent / "shared" / "data" / "torch_npu_tests",
    "a checkout of Ascend/pytorch, or the part of it with the folder test",
)

if __name__ == "__main__":
    raise SystemExit(sim_suite.run_suite(SUITE))
