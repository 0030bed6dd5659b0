"""Settings that follow from several values at once: batches in tokens, shares of the steps, machines."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

from anabatic.config import commands, deepspeed, load
from anabatic.convert import named, tables
from anabatic.convert.draft import Draft, fit
from anabatic.core.errors import ConfigError

_ROWS = {"dpo": 2, "reward": 2}
"""Sequences of a row: both answers of a pair."""
_CHECKPOINT = re.compile(r"(?:global_)?(?:checkpoint|step)[-_]?\d+")
_SCHEDULES = {
    "linear": "linear",
    "linear_with_warmup": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
}


def finish(made: Draft, folder: Path) -> None:
    """Add what follows from the gathered facts; `folder` is where relative names of files begin.

    Raises:
        ConfigError: a value is of the wrong type, or a file that is named is torn.
    """
    _machines(made)
    named.lists(made)
    _deepspeed(made, folder)
    _answers(made) if made.command == "rl" else _batch(made)
    _schedule(made)
    _stopping(made)
    named.sources(made, folder)
    named.model(made)
    _kind(made)
    _resume(made)


def world(made: Draft) -> int:
    """Return the processes of the job, over all machines."""
    return (made.number("nproc") or 1) * (made.number("nnodes") or 1)


def _machines(made: Draft) -> None:
    visible = made.facts.get("visible")
    if visible is not None:
        made.variables.append(visible.shown)
        count = len([one for one in str(visible.value).split(",") if one.strip()])
        if "nproc" not in made.facts and count > 1 and made.call.peer == "llamafactory":
            made.facts["nproc"] = type(visible)("nproc", count, visible.shown)
    if "processes" in made.facts:
        nodes = made.number("nnodes") or 1
        one = made.facts["processes"]
        made.facts["nproc"] = type(one)("nproc", max(1, (made.number("processes") or 1) // nodes), one.shown)
    nproc, nodes = made.number("nproc"), made.number("nnodes") or 1
    if not (commands.get(made.command).trains or made.command == "infer"):
        if nproc and nproc > 1:
            told = f"`anabatic {made.command}` runs in one process"
            made.notes.needless.append(f"{made.facts['nproc'].shown}: {told}")
        return
    if nodes == 1:
        if nproc and nproc > 1 and made.hint("device.nproc") is not None:
            made.set("device.nproc", nproc, made.facts["nproc"].shown)
        return
    rank = made.number("node_rank", least=0)
    made.launch = ["--nnodes", str(nodes), "--node-rank", "R" if rank is None else str(rank)]
    made.launch += ["--nproc", str(nproc or 1), "--master-addr", str(made.fact("master_addr") or "ADDRESS")]
    if "master_port" in made.facts:
        made.launch += ["--master-port", str(made.number("master_port"))]


def _deepspeed(made: Draft, folder: Path) -> None:
    if "deepspeed" not in made.facts or made.hint("parallel.deepspeed") is None:
        return
    one = made.facts["deepspeed"]
    if isinstance(one.value, dict):
        take(made, deepspeed.translate(one.value, "deepspeed"), "deepspeed")
        return
    source = str(one.value)
    known = tables.load(made.call.peer).names.get(Path(source).name)
    place = folder / source
    if not place.is_file() and known is None and source.endswith(".json"):
        made.set("parallel.deepspeed", source, one.shown)
        made.notes.changed.append(f"{one.shown}: read when the job runs, and translated then; it is not here now")
        return
    content = deepspeed.read(str(place) if place.is_file() else known or source)
    take(made, deepspeed.translate(content, source), one.shown)


def take(made: Draft, said: deepspeed.Translation, shown: str) -> None:
    """Take what a DeepSpeed file says, where the command itself says nothing."""
    for key, value in said.settings.items():
        if key not in made.settings and made.hint(key) is not None:
            made.set(key, value, shown)
    Option = type(made.facts["deepspeed"])
    for name, value in (
        ("micro_rows", said.sequences),
        ("accumulation", said.accumulation),
        ("global_rows", said.batch),
    ):
        if value is not None:
            made.facts.setdefault(name, Option(name, value, shown))
    made.notes.lost += [f"{key} in {shown}" for key in said.unknown]
    for keys, about in (
        (said.needless, "how it is sent, scaled and saved is decided here"),
        (said.auto, "auto, so other settings decide, or our defaults"),
    ):
        if keys:
            made.notes.needless.append(f"{', '.join(keys)} in {shown}: {about}")


def _kind(made: Draft) -> None:
    """Settings of LoRA mean LoRA; passes over the data stand in the place of a number of steps."""
    lora = next((given.origin for key, given in made.settings.items() if key.startswith("lora.")), "")
    if lora and "tuner" not in made.settings:
        made.set("tuner", "lora", lora)
    if made.command == "reward" and "tuner" in made.settings and made.settings["tuner"].value == "lora":
        _without_adapters(made)
    if made.command == "rl" and "schedule.epochs" in made.settings and "schedule.max_steps" not in made.settings:
        made.set("schedule.max_steps", None, "schedule.epochs counts")


def _resume(made: Draft) -> None:
    """A checkpoint to go on from is found by the run folder that it lies in."""
    one = made.facts.get("resume_from")
    if one is None:
        return
    path = Path(str(one.value))
    out = path.parent if _CHECKPOINT.fullmatch(path.name) else path
    if made.hint("out") is not None and "out" not in made.settings:
        made.set("out", str(out), one.shown)
    told = "the newest whole checkpoint of `out` is taken by itself; another program's is a `model` to begin with"
    made.notes.changed.append(f"{one.shown}: {told}")


def _without_adapters(made: Draft) -> None:
    """The head of a reward model is no part of an adapter: all of it is trained, at a rate of our own."""
    origin = made.settings["tuner"].origin
    made.notes.lost.append(f"{origin}: a reward model is trained whole, or with tuner freeze; optim.lr is our default")
    for key in [key for key in made.settings if key.startswith("lora.") or key in ("tuner", "optim.lr")]:
        del made.settings[key]


def _batch(made: Draft) -> None:
    """Rows become tokens: packed, a row is `batch.seq_len` of them (and both answers of a pair count)."""
    facts = [made.facts[name] for name in ("micro_rows", "accumulation", "global_rows") if name in made.facts]
    if made.hint("batch.micro_batch_tokens") is None or not facts:
        return
    if "batch.seq_len" not in made.settings:
        made.set("batch.seq_len", tables.load(made.call.peer).seq_len, "taken, since no length is given")
    length = made.settings["batch.seq_len"].value
    each = length * _ROWS.get(made.command, 1)
    unit = "row" if each == length else "pair of 2"
    micro, processes = made.number("micro_rows"), world(made)
    steps, rows = made.number("accumulation"), made.number("global_rows")
    if rows is None and steps is not None:
        rows = (micro or 1) * steps * processes
    elif rows is not None and micro is not None and steps is not None:
        _agree(made, rows, micro, steps)
    if micro is not None:
        made.set("batch.micro_batch_tokens", micro * each, f"{_many(micro, unit)} x {length} tokens")
    if rows is not None and "batch.global_batch_tokens" not in made.settings:
        least = (micro or 1) * processes
        if rows < least:
            told = f"{_many(rows, 'row')} a step are less than {processes} processes x {_many(micro or 1, 'row')}"
            made.notes.changed.append(f"{told}; {least} are taken")
        rows = max(rows, least)
        origin = f"{_many(rows, unit)} x {length} tokens, {_many(processes, 'process')}"
        made.set("batch.global_batch_tokens", rows * each, origin)
        if "nproc" not in made.facts and made.call.peer in ("llamafactory", "deepspeed"):
            told = "for one process; with more give device.nproc, and as many times the tokens where rows a step follow"
            made.notes.changed.append(f"batch.global_batch_tokens: {told} from the processes")
    _say_tokens(made, length)


def _agree(made: Draft, rows: int, micro: int, steps: int) -> None:
    """Rows of a step, of a micro-batch and micro-batches are given: the number of processes follows."""
    told = f"{rows} rows a step are {micro} rows x {steps} micro-batches x {rows / (micro * steps):g} processes"
    if rows % (micro * steps) or ("nproc" in made.facts and rows != micro * steps * world(made)):
        given = f", not {world(made)}" if "nproc" in made.facts else ""
        shown = made.facts["global_rows"].shown
        raise ConfigError(f"{shown}: {told}{given}", "make train_batch_size and the others agree, or leave one out")
    if "nproc" not in made.facts and rows > micro * steps:
        made.notes.changed.append(f"{told}: give device.nproc")


def _many(count: int, what: str) -> str:
    """`1 row`, `2 pairs of 2`, `4 processes`."""
    head, _, rest = what.partition(" ")
    ending = "" if count == 1 else "es" if head.endswith("s") else "s"
    return " ".join([str(count), head + ending, *([rest] if rest else [])])


def _say_tokens(made: Draft, length: int) -> None:
    tokens = {key: made.settings[f"batch.{key}_batch_tokens"].value for key in ("micro", "global")
              if f"batch.{key}_batch_tokens" in made.settings}  # fmt: skip
    names = (name for name in ("micro_rows", "accumulation", "global_rows") if name in made.facts)
    shown = ", ".join(dict.fromkeys(made.facts[name].shown for name in names))
    sizes = ", ".join(f"batch.{key}_batch_tokens {value}" for key, value in tokens.items())
    packed = (
        "" if made.call.peer == "nanochat" else "; packed, they hold more rows than there, and an epoch fewer steps"
    )
    made.notes.changed.append(f"{shown} -> {sizes}: tokens, not rows, at {length} a row{packed}")


def _answers(made: Draft) -> None:
    """Reinforcement learning counts answers: rows of a micro-batch there are answers here, too."""
    micro, each = made.number("micro_rows"), made.number("num_samples") or 8
    if "num_samples" in made.facts:
        made.set("num_samples", each, made.facts["num_samples"].shown)
    if micro is None:
        return
    made.set("device_batch_size", micro, made.facts["micro_rows"].shown)
    if "examples_per_step" in made.settings:
        return
    answers = micro * (made.number("accumulation") or 1) * world(made)
    questions = max(1, ceil(answers / each))
    while questions * each % micro:
        questions += 1
    origin = f"{answers} answers a step, {each} to each question"
    made.set("examples_per_step", questions, origin)
    made.set(
        "num_samples",
        each,
        made.settings.get("num_samples", type(made.settings["device_batch_size"])(0, origin)).origin,
    )
    made.notes.changed.append(f"{origin} -> examples_per_step {questions}: questions of a step, over all processes")


def _schedule(made: Draft) -> None:
    if made.hint("schedule.decay") is None:
        return
    warmup = _warmup(made)
    one = made.facts.get("scheduler")
    if one is None:
        falls = load.defaults(commands.get(made.command).job_class())["schedule"]["decay_ratio"]
        if "schedule.decay_ratio" not in made.settings and warmup + falls > 1.0:
            made.set("schedule.decay_ratio", round(1.0 - warmup, 6), "all steps after the warm-up")
        return
    kind = str(one.value).lower()
    decay = _SCHEDULES.get(kind)
    if decay is None:
        made.notes.lost.append(f"{one.shown}: known are {', '.join(_SCHEDULES)}; cosine is taken")
        decay = "cosine"
    made.set("schedule.decay", decay, one.shown)
    if kind == "constant":
        made.set("schedule.warmup_ratio", 0.0, one.shown)
        warmup = 0.0
    elif "schedule.warmup_ratio" not in made.settings:
        made.set("schedule.warmup_ratio", warmup, "not given there")
    made.set("schedule.decay_ratio", 0.0 if decay == "none" else round(1.0 - warmup, 6), "all steps after the warm-up")
    if kind == "cosine_with_min_lr":
        made.notes.changed.append(f"{one.shown}: give schedule.final_lr_ratio, the last rate as a share of the peak")
    elif decay != "none":
        made.set("schedule.final_lr_ratio", 0.0, one.shown)


def _warmup(made: Draft) -> float:
    """Return the share of the steps in which the rate rises."""
    steps = made.facts.get("warmup_steps")
    if steps is not None and float(fit(steps.value, float, steps.shown)) > 0:
        count = float(fit(steps.value, float, steps.shown))
        most = made.settings.get("schedule.max_steps")
        if count < 1 or most is not None:
            share = count if count < 1 else min(1.0, count / most.value)  # type: ignore[union-attr]
            made.set("schedule.warmup_ratio", round(share, 6), f"{steps.shown} of the steps")
        else:
            told = "a share of all steps here, and their number follows from the data"
            made.notes.changed.append(f"{steps.shown}: {told}; 0.03 is taken for schedule.warmup_ratio")
            made.set("schedule.warmup_ratio", 0.03, f"for {steps.shown}; put steps / all steps")
    given = made.settings.get("schedule.warmup_ratio")
    return float(given.value) if given else 0.0


def _stopping(made: Draft) -> None:
    """Early stopping needs evaluations, and something held out."""
    if "eval.patience" not in made.settings or not made.settings["eval.patience"].value:
        return
    if "eval.every" not in made.settings and made.command.partition(" ")[0] != "classify":
        every = made.settings["save.every"].value if "save.every" in made.settings else 100
        made.set("eval.every", every or 100, "eval.patience counts evaluations")
    none = made.settings.get("data.valid_fraction")
    if none is not None and none.value == 0 and "data.valid" not in made.settings:
        del made.settings["data.valid_fraction"]
