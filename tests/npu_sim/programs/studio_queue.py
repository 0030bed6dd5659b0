"""Three trainings in the studio's queue, of one, one and two devices; prints which devices each had, and when."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from anabatic_studio.jobs.job_queue import JobQueue
from anabatic_studio.jobs.store import ENDED_STATES, StudioStore

RECIPE = """
tokenizer: {tokenizer}
model: {{depth: 1, width: 64}}
out: {name}
data: {{train: [{text}]}}
batch: {{seq_len: 64, micro_batch_tokens: 256, global_batch_tokens: 512}}
schedule: {{max_steps: 4}}
device: {{type: npu, nproc: {nproc}, dtype: bf16}}
"""

state = Path("state")
state.mkdir()
store = StudioStore(state / "studio.sqlite3")
queue = JobQueue(store, state)
jobs = [
    queue.submit_job(
        "pretrain", RECIPE.format(name=name, nproc=nproc, text=sys.argv[1], tokenizer=sys.argv[2]), name
    ).id
    for name, nproc in (("a", 1), ("b", 1), ("c", 2))
]
devices: dict[str, list[int]] = {}
together: set[str] = set()
waited = ""
while True:
    queue.poll_jobs()
    rows = [store.get_job(job) for job in jobs]
    devices.update({row.name: row.devices for row in rows if row.devices})
    together.add("".join(row.name for row in rows if row.devices))
    waited = next((row.message for row in rows if row.name == "c" and row.message), waited)
    if all(row.state in ENDED_STATES for row in rows):
        break
    time.sleep(0.1)
logs = {row.name: queue.read_log(row.id, 0)[0][-1500:] for row in rows}
states = [row.state for row in rows]
store.close()
print(json.dumps({"devices": devices, "together": sorted(together), "waited": waited, "states": states, "logs": logs}))
