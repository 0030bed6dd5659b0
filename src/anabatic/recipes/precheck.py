"""What can be wrong with a job, found before anything heavy is loaded and before an earlier stage costs hours.

No torch: a mistyped file is told in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabatic.core import run_names
from anabatic.core.errors import AnabaticError, ConfigError, DataError, Several, UserError
from anabatic.core.model_files import no_model
from anabatic.core.text import did_you_mean
from anabatic.recipes import first_rows, job_checks, length
from anabatic.recipes.made import MODELS, OTHERS, UNKNOWN, Earlier, Made, of_stage, sizes_of, whole

_INNER = ("", "best_model", "final_model")
_TAKES: dict[str, tuple[str, ...]] = {
    "classify predict": ("classify train",),
    "classify eval": ("classify train",),
    "classify train": (*MODELS, "classify train"),
    "reward": (*MODELS, "reward"),
    "export": (*MODELS, *OTHERS),
    "merge": (*MODELS, *OTHERS),
    "serve": (*MODELS, *OTHERS),
}
"""Command -> commands whose models it takes; the others take what writes text."""


_CHATS = ("rl", "dpo", "reward")
"""Commands whose rows always are conversations."""
_REWARDS = ("answer", "format", "length", "tests")


def require(command: str, job: Any) -> None:
    """Refuse a job that cannot run.

    Raises:
        AnabaticError: what is wrong with it; `Several` where that is more than one thing.
    """
    _raise(problems(command, job))


def problems(command: str, job: Any, earlier: Earlier | None = None) -> list[AnabaticError]:
    """Return what is wrong with a job, as far as that is known without its model.

    Args:
        earlier: what the stages before it will have made; what is not there yet is looked for among that.
    """
    known = earlier or {}
    checks = (
        _model(command, job, earlier), _tokenizer(job, known), _template(command, job, known), _sizes(job, known),
        _rewards(job), _tasks(command, job), job_checks.check(command, job, earlier),
    )  # fmt: skip
    found: list[AnabaticError] = list(first_rows.check(command, job, lambda name: of_stage(name, known) is not None))
    found += [error for check in checks for error in check]
    return list({(str(error), error.hint): error for error in found}.values())  # two checks may name one file


def require_to_plan(command: str, job: Any) -> list[str]:
    """Refuse what a job would refuse wherever it runs; return what it names and is not there yet, to be told behind the
    plan: it is made before things are fetched.

    Raises:
        AnabaticError: what is wrong with it; `Several` where that is more than one thing.
    """
    absent = first_rows.absent(job)
    later = [spec for spec in job_checks.adapters(job) if job_checks.is_absent(spec)]
    here = replace(job, adapter=[spec for spec in job.adapter if spec not in later]) if later else job
    found: list[AnabaticError] = list(first_rows.check(command, job, lambda name: name in absent))
    checks = (_template(command, job, {}), _rewards(job), job_checks.settings(here, {}))
    _raise([*found, *(error for check in checks for error in check)])
    lacking = (*absent.values(), *(f"{spec}: no such adapter" for spec in later))
    return [f"{what} (the plan is made without it, the job needs it)" for what in lacking]


def _raise(found: list[AnabaticError]) -> None:
    if found:
        raise found[0] if len(found) == 1 else Several(found)


def _model(command: str, job: Any, earlier: Earlier | None) -> Iterator[UserError]:
    name = length.model_of(job)
    if not name or getattr(job, "endpoint", None):
        return
    made = of_stage(name, earlier or {})
    if made is not None:
        yield from _model_of_stage(command, name, made, earlier or {})
        return
    if earlier is None:
        found = None if command.startswith("bench ") else job_checks.missing(name, getattr(job, "hub", None))
        yield from [] if found is None else [found]
        return
    if length.folder_of(name) is not None or _on_a_hub(name, earlier):
        return
    root = Path(name).expanduser()
    if root.exists():
        yield from [] if command.startswith(("classify ", "bench ")) else [no_model(root)]
        return
    near = _near(root, [Path(folder) for folder in earlier])
    hint = "give a Hugging Face folder or a finished run folder"
    yield DataError(f"model folder {root} does not exist", f"{hint}.{near}" if near else hint)


def _on_a_hub(name: str, earlier: Earlier) -> bool:
    """Whether a name may mean a model that is fetched; what would lie among the folders of the stages does not."""
    among = any(whole(name).parent == whole(folder).parent for folder in earlier)
    return run_names.HUB_ID.fullmatch(name) is not None and not os.path.lexists(name) and not among


def _near(path: Path, made: list[Path]) -> str:
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(
        path.name, [*beside, *(one.name for one in made if one.absolute().parent == path.absolute().parent)]
    )


def _model_of_stage(command: str, name: str, made: Made, earlier: Earlier) -> Iterator[UserError]:
    takes = _TAKES.get(command, MODELS)
    fit = [other.stage for other in earlier.values() if other.command in takes]
    hint = f"name a stage that does: {', '.join(fit)}" if fit else "put one that does before it"
    if made.command == UNKNOWN:
        return
    if not made.has_model:
        yield ConfigError(f"model is {name}, of stage {made.stage}: `{made.command}` makes no model", hint)
    elif made.command not in takes:
        kind = OTHERS.get(made.command, "a model that writes text")
        yield ConfigError(f"model is {name}: stage {made.stage} makes {kind}, which `{command}` cannot use", hint)
    else:
        inside = next(whole(name).relative_to(whole(folder)) for folder, one in earlier.items() if one is made)
        if str(inside.parts[0] if inside.parts else "") not in _INNER and not str(inside).startswith("checkpoint-"):
            yield ConfigError(
                f"model is {name}: stage {made.stage} writes nothing of that name", "name best_model or final_model"
            )


def _tokenizer(job: Any, earlier: Earlier) -> Iterator[UserError]:
    name = getattr(job, "tokenizer", None)
    if not isinstance(name, str) or not name:
        return
    made = of_stage(name, earlier)
    if made is None:
        from anabatic.data import tokenizer

        try:
            tokenizer.find(name)
        except UserError as error:
            yield error
        return
    if not made.has_model and made.command not in ("tokenizer train", UNKNOWN):
        yield ConfigError(
            f"tokenizer is {name}, of stage {made.stage}: `{made.command}` makes no tokenizer",
            "name a stage of `tokenizer train`, or one that makes a model",
        )
    model = length.model_of(job)
    entries = sizes_of(model, earlier)[1] if model else None
    if entries is not None and made.vocab is not None and made.vocab > entries:
        yield DataError(
            f"the tokenizer of {name} has {made.vocab} entries, the model {entries}",
            "use the tokenizer that the model was trained with",
        )


def _template(command: str, job: Any, earlier: Earlier) -> Iterator[UserError]:
    """A model of a stage has the template of our tokenizers, one of a hub is not here yet."""
    name = getattr(job, "tokenizer", None) or length.model_of(job)
    if command not in _CHATS or not name or getattr(job, "chat_template", None) or of_stage(name, earlier):
        return
    folder = Path(name).expanduser() if getattr(job, "tokenizer", None) else length.folder_of(name)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return  # an adapter may take that of its base
    file = folder / "chat_template.jinja"
    if not file.is_file() and not length.read_object(folder / "tokenizer_config.json").get("chat_template"):
        yield DataError(f"{folder} has no chat template", "use a chat model's tokenizer, or train one with ours")


def _rewards(job: Any) -> Iterator[UserError]:
    for spec in getattr(job, "rewards", ()):
        name = spec.partition("=")[0]
        file, _, function = name.rpartition(":")
        if file.endswith(".py") and function and not Path(file).expanduser().is_file():
            yield ConfigError(f"{file}: no such file", "name a Python file: FILE.py:FUNCTION")
        elif not file.endswith(".py") and file != "model" and name not in _REWARDS:
            known = [*_REWARDS, "model:FOLDER", "FILE.py:FUNCTION"]
            yield ConfigError(f'there is no reward "{name}".{did_you_mean(name, known)}', f"use {', '.join(known)}")


def _tasks(command: str, job: Any) -> Iterator[UserError]:
    if command != "eval" or not job.tasks:
        return
    from anabatic.evals import core, known

    folder = None if job.tasks_from in (None, "hub") else Path(job.tasks_from).expanduser()
    if folder is not None and not folder.is_dir():
        yield ConfigError(f"tasks_from is {folder}, which is no folder", "name the folder of the data sets")
    try:
        # CORE's own tasks lie in its bundle, which may have to be fetched.
        known.plan(
            [
                name if limit is None else f"{name}#{limit}"
                for name, limit in known.split(job.tasks)
                if name != core.NAME
            ]
        )
    except UserError as error:
        yield error


def _sizes(job: Any, earlier: Earlier) -> Iterator[UserError]:
    model = length.model_of(job)
    positions = sizes_of(model, earlier)[0] if model else None
    if positions is None:
        return
    made = of_stage(model, earlier)
    by = f" by stage {made.stage}" if made is not None else ""
    given = getattr(getattr(job, "batch", None), "seq_len", None)
    if given is not None and given > positions:
        yield DataError(
            f"batch.seq_len is {given}, the model was made{by} for {positions} positions",
            f"use --batch.seq-len {positions} or less",
        )
    reply = getattr(job, "max_new_tokens", None) if getattr(job, "tasks", ()) and not job.endpoint else None
    if reply is not None and reply >= positions:
        yield DataError(
            f"a reply of {reply} tokens leaves no room for a question, the context has {positions}",
            "ask for shorter replies with --max-new-tokens",
        )
