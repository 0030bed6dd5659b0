"""The batch script is one that a shell runs; small scripts stand in for Slurm's own programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from anabatic.core.errors import ConfigError, Failure
from anabatic.launch import slurm

PROGRAMS = {
    "scontrol": """
case "$1" in
  show) printf 'first\\nsecond\\n' ;;
  requeue) echo "requeue $2" >> said ;;
esac
""",
    "srun": """
shift
worst=0
for number in 0 1; do SLURM_NODEID=$number "$@" || worst=$?; done
exit $worst
""",
    "anabatic": """
echo "$MASTER_ADDR:$MASTER_PORT ${NODE_RANK-none} $(printf '<%s>' "$@")" >> said
exit ${ENDS-0}
""",
}


def run(folder: Path, text: str, **variables: str) -> tuple[int, list[str]]:
    """Run a script with the programs in place; return its exit code and what they were told."""
    for name, body in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "x", **variables}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, (folder / "said").read_text().splitlines()


def test_every_machine_gets_its_launcher(tmp_path: Path) -> None:
    batch = slurm.Batch("job", 2, 8, options=("--partition=train",), setup=("export GREETING=hello",))
    text = slurm.script(batch, ["sft", "-c", "my recipe.yaml", "--seed", "$HOME"])
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gres=npu:8\n" in text and "#SBATCH --partition=train\n" in text
    code, said = run(tmp_path, text)
    options = "<--nproc=8><--max-restarts=3><--max-requeues=3><--nnodes=2>"
    words = f"<launch>{options}<--><sft><-c><my recipe.yaml><--seed><$HOME>"
    assert (code, said) == (0, [f"first:20007 {number} {words}" for number in (0, 1)])


def test_names_are_quoted_where_they_must() -> None:
    text = slurm.script(slurm.Batch("my job", 1, 8, gres="gpu:a100", options=("-p train",)), ["sft"])
    assert "#SBATCH '--job-name=my job'\n" in text
    assert "#SBATCH --gres=gpu:a100:8\n#SBATCH" in text and "#SBATCH -p train\n" in text


@pytest.mark.parametrize(("code", "again"), [(143, True), (1, False), (2, False)])
def test_a_job_that_has_saved_itself_is_queued_again(tmp_path: Path, code: int, again: bool) -> None:
    ended, said = run(tmp_path, slurm.script(slurm.Batch("job", 1, 1, gres=""), ["sft"]), ENDS=str(code))
    assert ended == code
    assert ("requeue 40007" in said) is again
    assert "--gres" not in slurm.script(slurm.Batch("job", 1, 1, gres=""), ["sft"])


def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch"):
        slurm.submit("x")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/bash\nread line\nif [ "$line" = bad ]; then echo "no such partition" >&2; exit 1; fi\n'
                      'echo "Submitted batch job 7"\n')  # fmt: skip
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.submit("#!/bin/bash\n") == "Submitted batch job 7"
    with pytest.raises(Failure, match="exit code 1: no such partition"):
        slurm.submit("bad\n")
