"""Scripts of clusters: what only the shell knows stays open, wrappers and nested shells are looked through."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.convert import converter

SLURM = """#!/bin/bash
#SBATCH --nodes=2
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
DEVICES=`npu-smi info -l | grep -c ID`
LAUNCHER="torchrun --nproc_per_node $DEVICES --nnodes $SLURM_NNODES \\
  --rdzv_id $RANDOM --rdzv_endpoint $address:29500 --master_port $PORT"
cat > ds.json <<END
{"made": "$(date)", 'torn
END
for rate in 1e-4 2e-4; do
  CMD="train.py --model_name_or_path M --learning_rate $rate --lora_rank 8 --output_dir out-$(date +%F)"
  srun --jobid $SLURM_JOBID bash -c "$LAUNCHER $CMD" 2>&1 | tee log
done
"""


def test_a_script_of_slurm() -> None:
    made = converter.convert_command("deepspeed", [SLURM])
    assert made.text.startswith("# anabatic sft -c FILE")
    assert "r: 8  # --lora_rank 8" in made.text
    told = [note for note in made.messages if "only the shell knows this value" in note]
    for word in ("MASTER_ADDR", "--nproc_per_node", "--nnodes", "--rdzv_id", "--master_port", "--learning_rate $rate"):
        assert len([note for note in told if word in note]) == 1, word
    assert any(note.endswith("give device.nproc") for note in told)
    assert any(note.endswith("give anabatic launch --nnodes") for note in told)


TRAIN = "torchrun --nproc_per_node 4 train.py --model_name_or_path M"


@pytest.mark.parametrize(
    "line",
    [
        f"srun bash -c '{TRAIN}'",
        f"bash -lc 'cd x && {TRAIN}'",
        f"CMD='{TRAIN}'\neval $CMD",
        f"singularity exec --bind /data image.sif {TRAIN}",
        f"docker run --rm image bash -c '{TRAIN}'",
        f"conda run -n env {TRAIN}",
        f"if ! {TRAIN}; then exit 1; fi",
        f"run() {{ {TRAIN}; }}\nrun",
        f"bash -c 'it is torn\" {{' || true\n{TRAIN}",
    ],
)
def test_what_starts_a_training(line: str) -> None:
    made = converter.convert_command("deepspeed", [line])
    assert "nproc: 4  # torchrun --nproc_per_node 4" in made.text


def test_an_option_says_what_a_variable_says() -> None:
    line = "export MASTER_ADDR=$(hosts)\ntorchrun --nnodes 2 --nproc_per_node 8 --master_addr $MASTER_ADDR a.py"
    made = converter.convert_command("deepspeed", [line])
    assert made.text.startswith("# anabatic launch --nnodes 2 --node-rank R --nproc 8 --master-addr ADDRESS -- sft")
    told = [note for note in made.messages if "only the shell knows" in note]
    assert told == [
        "changed: torchrun --master_addr $(hosts): only the shell knows this value; give anabatic launch --master-addr"
    ]


def test_the_sample(shared_data: Path) -> None:
    sample = shared_data / "outside_cases" / "c5-subst.sh"
    if not sample.is_file():
        pytest.skip("shared/data/outside_cases is not beside the checkout")
    made = converter.convert_command("deepspeed", [str(sample)], "sft")
    assert made.text.startswith("# anabatic launch --nnodes 2 ")
    assert len([note for note in made.messages if "only the shell knows" in note]) == 1
