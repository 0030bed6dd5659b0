"""Jobs kept alive: ranks killed or stopped, an agent killed, a machine gone; the losses are an undisturbed run's."""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import psutil

from anabatic_testing.multiprocess import find_free_port
from e2e import command
from e2e.home import STEPS, Home, Options

HANG = 10


def launch(*words: object) -> list[object]:
    """The words of `anabatic launch` up to the command."""
    return ["launch", *words, "--"]


def agent(process: command.Running) -> psutil.Process:
    """The agent of a launcher, once its workers run."""
    launcher = psutil.Process(process.pid)
    found: list[psutil.Process] = []

    def started() -> bool:
        found[:] = [child for child in launcher.children() if child.children()]
        return bool(found)

    command.wait_for(process, started)
    return found[0]


def worker(process: command.Running, rank: int) -> psutil.Process:
    """The process of a local rank."""
    workers = agent(process).children(recursive=True)
    return next(one for one in workers if one.name() == f"python rank {rank}")


def test_ranks_and_their_agent_fail_and_the_losses_are_the_same(home: Home, base2: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = launch("--max-restarts", 6, "--hang-seconds", HANG)
    process = home.start(*options, *home.pretrain(out, 2))
    command.wait_for_step(process, out, 7)
    worker(process, 1).kill()
    command.wait_for(process, lambda: command.events(out).count("resume") >= 1)
    reached = max(command.losses(out))
    command.wait_for(process, lambda: max(command.losses(out)) > reached + 4)
    worker(process, 1).send_signal(signal.SIGSTOP)
    command.wait_for(process, lambda: command.events(out).count("resume") >= 2)
    reached = max(command.losses(out))
    command.wait_for(process, lambda: max(command.losses(out)) > reached + 4)
    agent(process).kill()
    said = command.end(process).err
    assert "rank 1 ended without a message (killed by SIGKILL): all processes start again, restart 1 of 6" in said
    assert f"no process has moved for {HANG} s" in said and "the process is stopped (SIGSTOP)" in said
    assert "the launcher's agent has ended (killed by SIGKILL): starting again" in said
    assert "stands_here" not in said and list(out.glob("stacks-*.txt"))
    assert command.events(out).count("resume") >= 3
    assert command.losses(out) == command.losses(base2)
    assert (out / "final_model" / "model.safetensors").read_bytes() == (
        base2 / "final_model" / "model.safetensors"
    ).read_bytes()


def test_a_mistake_is_not_tried_again(home: Home, tmp_path: Path) -> None:
    missing = {"tokenizer": tmp_path / "nowhere"}
    done = home.anabatic(*launch("--max-restarts", 3), *home.pretrain(tmp_path / "run", 2, missing), code=2)
    assert "start again" not in done.err and done.err.count("error: ") == 1


def test_two_machines_and_one_of_them_is_lost(home: Home, base2: Path, tmp_path: Path) -> None:
    port = find_free_port()
    out = tmp_path / "run"

    def machine(number: int) -> command.Running:
        words = launch(
            "--nnodes",
            2,
            "--node-rank",
            number,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            "--nproc",
            1,
            "--max-restarts",
            3,
            "--join-seconds",
            120,
        )
        return home.start(*words, *home.pretrain(out))

    one = machine(1)  # the order in which they come does not matter
    zero = machine(0)
    command.wait_for_step(zero, out, 7)
    command.kill(one)
    one.communicate()
    again = machine(1)
    ends = [command.end(process) for process in (zero, again)]
    assert "step 40/40" in ends[0].err and "step 40/40" not in ends[1].err, "rank 0 is on machine 0"
    assert max(command.losses(out)) == STEPS
    assert command.losses(out) == command.losses(base2)


def test_a_lost_machine_continues_from_its_neighbours_memory(home: Home, tmp_path: Path) -> None:
    out, alone, port = tmp_path / "run", tmp_path / "alone", find_free_port()
    memory = [tmp_path / "memory-0", tmp_path / "memory-1"]
    more: Options = {"parallel.strategy": "zero3", "save.every": 0, "optim.name": "adamw", "optim.lr": 0.003}
    job = home.pretrain(out, more={**more, "save.memory-every": 3})
    job = job[: job.index("--device.nproc")] + job[job.index("--device.nproc") + 2 :]

    def machine(number: int) -> command.Running:
        at = ("--nnodes", 2, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port, "--nproc", 1)
        own = replace(home, variables={"ANABATIC_MEMORY_DIR": str(memory[number])})
        return own.start(*launch(*at, "--max-restarts", 3, "--join-seconds", 120), *job)

    one, zero = machine(1), machine(0)
    command.wait_for_step(zero, out, 7)
    command.kill(one)
    one.communicate()
    shutil.rmtree(memory[1])  # the machine is lost with its memory
    again = machine(1)
    ends = [command.end(process) for process in (zero, again)]
    continued = re.search(rf"continuing from {memory[0]}/\S+: step (\d+)", ends[0].err)
    assert continued and int(continued[1]) >= 6 and int(continued[1]) % 3 == 0, ends[0].err
    fetched = rf"step {continued[1]}: [2-4] parts come from the memory of other machines"  # more beside a copy
    assert re.search(fetched, ends[0].err), "".join(re.findall(r".*memory.*\n", ends[0].err))
    assert command.checkpoints(out) == [STEPS] and not any(list(folder.iterdir()) for folder in memory)
    home.anabatic(*home.pretrain(alone, 2, more=more))
    assert command.losses(out) == command.losses(alone)
    models = [(folder / "final_model" / "model.safetensors").read_bytes() for folder in (out, alone)]
    assert models[0] == models[1]


def test_a_stop_after_the_launcher_of_machine_0_was_killed(home: Home, tmp_path: Path) -> None:
    """All ranks save, and the other machine, which has lost the rendezvous, exits with the code to be queued again."""
    out, port = tmp_path / "run", find_free_port()
    at = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--nproc", 1, "--max-restarts", 3)
    words = home.pretrain(out, more={"schedule.max-steps": 100_000})
    zero, one = (home.start(*launch(*at, "--node-rank", number), *words) for number in (0, 1))
    command.wait_for_step(zero, out, 7)
    psutil.Process(zero.pid).kill()
    rank = agent(one).children(recursive=True)[0]
    command.wait_for(one, lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    psutil.Process(one.pid).terminate()
    end = command.end(one, 143)
    zero.communicate()
    assert "did not meet" not in end.err and command.checkpoints(out), end.err


def test_of_two_machines_with_one_number_the_later_takes_part(home: Home, tmp_path: Path) -> None:
    at = ("--nnodes", 3, "--master-addr", "127.0.0.1", "--master-port", find_free_port(), "--max-restarts", 2)
    zero, *ones = [
        home.start(*launch(*at, "--node-rank", number), *home.pretrain(tmp_path / "run")) for number in (0, 1, 1)
    ]
    command.wait_for(zero, lambda: any(one.poll() is not None for one in ones))
    replaced, stays = sorted(ones, key=lambda one: one.poll() is None)
    said = command.end(replaced, 1).err
    assert "error: machine 1 has come again, from 127.0.0.1: that one takes part in its place" in said
    assert "starting again" not in said and stays.poll() is None
    for process in (zero, stays):
        process.send_signal(signal.SIGTERM)
    for process in (zero, stays):
        command.end(process, 143)


def test_machines_with_different_jobs_are_told(home: Home, tmp_path: Path) -> None:
    at = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", find_free_port(), "--max-restarts", 2)
    processes = []
    for number, seed in ((0, 1), (1, 2)):
        words = launch(*at, "--node-rank", number)
        processes.append(home.start(*words, *home.pretrain(tmp_path / "run", more={"seed": seed})))
    for process in processes:
        said = command.end(process, 2).err
        assert "error: the machines run different jobs: seed is 1 on machine 0 and 2 on machine 1" in said
        assert "starting again" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_who_is_missing_is_named(home: Home, tmp_path: Path) -> None:
    port = find_free_port()
    words = launch(
        "--nnodes", 3, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port, "--join-seconds", 8
    )
    said = home.anabatic(*words, *home.pretrain(tmp_path / "run"), code=1).err
    assert f"waiting for machines 1, 2 at 127.0.0.1:{port} (1 of 3 are here)" in said


def test_what_cannot_be_launched(home: Home) -> None:
    said = home.anabatic(*launch(), "chat", "-m", "x", code=2).err
    assert "chat is not a command that trains" in said and "hint: these are: pretrain, sft, dpo" in said
    assert "which command?" in home.anabatic("launch", code=2).err
    assert "stand after --" in home.anabatic("launch", "sft", "-c", "x.yaml", code=2).err
    assert (
        "--nnodes is 2, but where do the machines meet?"
        in home.anabatic(*launch("--nnodes", 2), *home.pretrain(Path("x")), code=2).err
    )
