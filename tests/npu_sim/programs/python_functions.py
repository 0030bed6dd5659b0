"""The same training by the function and by the command, on the devices of this machine; prints what came of both."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import anabatic

SETTINGS = {
    "tuner": "lora",
    "schedule": {"max_steps": 3},
    "batch": {"seq_len": 64, "micro_batch_tokens": 128, "global_batch_tokens": 256},
    "device": {"type": "npu"},
}
OPTIONS = """
--tuner lora --schedule.max-steps 3 --device.type npu
--batch.seq-len 64 --batch.micro-batch-tokens 128 --batch.global-batch-tokens 256
"""


def main() -> None:
    folder, nproc = Path(sys.argv[1]), int(sys.argv[2])
    files = {"model": folder / "model", "data": folder / "rows.jsonl"}
    run = anabatic.sft(**files, out=folder / "function", nproc=nproc, **SETTINGS)
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    command = [sys.executable, "-m", "anabatic", "sft", *words, "--out", str(folder / "command"), *OPTIONS.split()]
    subprocess.run([*command, "--nproc", str(nproc)], check=True, stdout=subprocess.DEVNULL)
    weights = [next((folder / out / "final_model").glob("*.safetensors")) for out in ("function", "command")]
    answer = run.chat("the wind", sampling={"max_new_tokens": 4, "temperature": 0}) if nproc == 1 else ""
    told = {
        "finished": run.is_finished,
        "weights": [hashlib.sha256(file.read_bytes()).hexdigest() for file in weights],
        "log": (folder / "function" / "rank-0.log").read_text(),
        "answered": isinstance(answer, str),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
