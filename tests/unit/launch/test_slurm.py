"""The batch script is one that a shell runs; small scripts stand in for Slurm's own programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from anabatic.core.errors import ConfigError, Failure
from anabatic.launch.schedulers import slurm

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
for number in 0 1; do SLURM_NODEID=$number "$@"; code=$?; ((worst = code > worst ? code : worst)); done
exit $worst
""",
    "anabatic": """
echo "$MASTER_ADDR:$MASTER_PORT ${NODE_RANK-none} $(printf '<%s>' "$@")" >> said
ends="ENDS_${NODE_RANK-0}"
exit ${!ends-0}
""",
}


def run(folder: Path, text: str, programs: dict[str, str] | None = None, **variables: str) -> tuple[int, list[str]]:
    """Run a script with the programs in place; return its exit code and what they were told."""
    for name, body in {**PROGRAMS, **(programs or {})}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "x", **variables}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, (folder / "said").read_text().splitlines()


@pytest.mark.process
def test_every_machine_gets_its_launcher(tmp_path: Path) -> None:
    batch = slurm.SlurmJob("job", 2, 8, options=("--partition=train",), setup=("export GREETING=hello",))
    text = slurm.render_script(batch, ["sft", "-c", "my recipe.yaml", "--seed", "$HOME"])
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gres=npu:8\n" in text and "#SBATCH --partition=train\n" in text
    code, said = run(tmp_path, text)
    options = "<--nproc=8><--max-restarts=3><--max-requeues=3><--nnodes=2>"
    words = f"<launch>{options}<--><sft><-c><my recipe.yaml><--seed><$HOME>"
    assert (code, said) == (0, [f"first:20007 {number} {words}" for number in (0, 1)])


@pytest.mark.process
def test_tasks_of_an_array_have_their_number(tmp_path: Path) -> None:
    batch = slurm.SlurmJob("job", 1, 1, options=("--array=3-4",))
    text = slurm.render_script(batch, ["sft", "--out", "my runs/%a-$x/%a", "--seed", "%a", "", "100%"])
    assert "#SBATCH --output=%x-%A_%a.log\n" in text
    code, said = run(tmp_path, text, SLURM_ARRAY_TASK_ID="4")
    assert code == 0 and said[0].endswith("<--><sft><--out><my runs/4-$x/4><--seed><4><><100%>")
    assert "<%a>" in run(tmp_path, slurm.render_script(slurm.SlurmJob("job", 1, 1), ["sft", "%a"]))[1][-1]


@pytest.mark.parametrize("option", ["--array=0-3", "--array 1", "-a 0-3", "-a0-3"])
def test_an_array_of_equal_runs_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="no word of the command distinguishes them"):
        slurm.render_script(slurm.SlurmJob("job", 1, 1, options=(option,)), ["sft", "--out", "runs/a"])


def test_names_are_quoted_where_they_must() -> None:
    text = slurm.render_script(slurm.SlurmJob("my job", 1, 8, gres="gpu:a100", options=("-p train",)), ["sft"])
    assert "#SBATCH '--job-name=my job'\n" in text
    assert "#SBATCH --gres=gpu:a100:8\n#SBATCH" in text and "#SBATCH -p train\n" in text


@pytest.mark.process
@pytest.mark.parametrize(("code", "again"), [(143, True), (1, False), (2, False), (130, False), (137, True)])
def test_a_job_that_has_saved_or_was_killed_is_queued_again(tmp_path: Path, code: int, again: bool) -> None:
    ended, said = run(tmp_path, slurm.render_script(slurm.SlurmJob("job", 1, 1, gres=""), ["sft"]), ENDS_0=str(code))
    assert ended == code
    assert ("requeue 40007" in said) is again
    assert "--gres" not in slurm.render_script(slurm.SlurmJob("job", 1, 1, gres=""), ["sft"])


ENDS = [((143, 143), 143, True), ((143, 137), 143, True)]
ENDS += [((137, 1), 1, False), ((143, 1), 1, False), ((2, 143), 2, False)]


@pytest.mark.process
@pytest.mark.parametrize(("codes", "code", "again"), ENDS)
def test_a_job_that_failed_on_one_machine_is_not(
    tmp_path: Path, codes: tuple[int, int], code: int, again: bool
) -> None:
    """srun ends the others with a SIGTERM, at which they save, and returns the highest code of all."""
    text = slurm.render_script(slurm.SlurmJob("job", 2, 1), ["sft"])
    ended, said = run(tmp_path, text, ENDS_0=str(codes[0]), ENDS_1=str(codes[1]))
    assert ended == code
    assert ("requeue 40007" in said) is again


@pytest.mark.process
def test_a_signal_does_not_end_the_shell_before_its_launcher(tmp_path: Path) -> None:
    """Slurm signals every process of a step, the shell among them."""
    saves = 'trap "sleep 0.5; echo saved >> said; exit 143" TERM'
    launcher = f"exec 2>/dev/null\necho began >> said\n{saves}\nwhile :; do sleep 0.02; done\n"
    signals = "( while ! grep -q began said 2>/dev/null; do sleep 0.02; done; kill -TERM -$child ) &"
    srun = f'shift\nset -m\n"$@" &\nchild=$!\n{signals}\nwait $child\n'
    ended, said = run(
        tmp_path, slurm.render_script(slurm.SlurmJob("job", 1, 1), ["sft"]), {"anabatic": launcher, "srun": srun}
    )
    assert (ended, said) == (143, ["began", "saved", "requeue 40007"])


@pytest.mark.process
def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch"):
        slurm.submit_script("x")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        '#!/bin/bash\nread line\nif [ "$line" = bad ]; then echo "no such partition" >&2; exit 1; fi\n'
        'echo "Submitted batch job 7"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.submit_script("#!/bin/bash\n") == "Submitted batch job 7"
    with pytest.raises(Failure, match="exit code 1: no such partition"):
        slurm.submit_script("bad\n")
