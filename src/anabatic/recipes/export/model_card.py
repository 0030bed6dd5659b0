"""The model card of a run: README.md with the metadata of Hugging Face (https://huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from anabatic import __version__
from anabatic.config.loading import command_table, settings, yaml_reader
from anabatic.core import json_reader, paths
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_count, format_duration
from anabatic.core.json_reader import to_finite_number
from anabatic.core.paths import RunFolder
from anabatic.data.readers import sources
from anabatic.hub.dataset_name import is_dataset_spec, split_spec
from anabatic.hub.datasets import RECORD_FILE
from anabatic.hub.model_download import Hub
from anabatic.hub.model_upload import UploadTarget
from anabatic.monitor.run_data import RunFiles

_METHODS = {
    "pretrain": "pretraining",
    "sft": "supervised fine-tuning (SFT)",
    "dpo": "preference optimization",
    "rl": "reinforcement learning",
    "reward": "reward modelling",
}
_RESULTS = {
    "valid_loss": "validation loss",
    "valid_perplexity": "validation perplexity",
    "valid_accuracy": "validation accuracy",
    "valid_bpb": "validation bits per byte",
    "valid_reward": "validation reward",
}
"""Key of an evaluation -> row of the card, in this order; accuracy is a share."""
_SETTINGS_LEFT_OUT = ("out", "log", "save", "device", "data", "model", "tokenizer", "hub", "adapter", "resume", "auto")
"""Settings that say nothing about the model, or where things are on a machine."""
_PAGES: dict[Hub, str] = {"huggingface": "https://huggingface.co", "modelscope": "https://modelscope.cn/models"}
_SCHEMES: dict[Hub, str] = {"huggingface": "hf", "modelscope": "ms"}


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    Attributes:
        name: `OWNER/NAME`.
        hub: where the card will be read.
        base_model: `OWNER/NAME` of the model that was trained on; empty: none, or a folder of the machine.
        is_adapter: the folder holds an adapter, not a whole model.
        license: identifier of SPDX; empty: not said.
        config: the settings of the run; empty: not known.
        summary: what summary.json says.
        evaluation: the row of metrics.jsonl that measured this model, with its step; empty: none did.
        datasets: what datasets.json says: spec -> commit, license.
        command: of the run; empty: not known.
    """

    name: str
    hub: Hub = "huggingface"
    base_model: str = ""
    is_adapter: bool = False
    license: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    command: str = ""


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return the settings of the run whose model is in a folder; empty: it is not in a run folder.

    Raises:
        DataError: config.yaml is damaged.
    """
    run = RunFolder(folder.parent)
    is_of_run = folder.name in (run.best_model.name, run.final_model.name) and run.config.is_file()
    return dict(yaml_reader.read_yaml(run.config).tree) if is_of_run else {}


def read_card_facts(folder: Path, target: UploadTarget, base_model: str, is_adapter: bool) -> CardFacts:
    """Return what there is to say of a model, also by the run that it came from.

    Raises:
        DataError: a file of the run is damaged.
    """
    facts = CardFacts(target.name, target.hub, base_model, is_adapter, target.license)
    config = read_run_config(folder)
    if not config:
        return facts
    run = RunFolder(folder.parent)
    command = command_table.find_training_command(config)
    return replace(
        facts,
        config=config,
        summary=(summary := _read_object(run.summary)),
        evaluation=_find_evaluation(run, summary, folder.name == run.best_model.name),
        datasets=_read_object(run.root / RECORD_FILE),
        command=command.name if command else "",
    )


def _find_evaluation(run: RunFolder, summary: Mapping[str, Any], is_best: bool) -> dict[str, Any]:
    """Return the last evaluation of the step whose model it is."""
    step = summary.get("best_step" if is_best else "steps")
    found = [row for row in RunFiles(run.root).iter_metrics("eval") if row.get("step") == step]
    return found[-1] if found and step is not None else {}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json_reader.read_json_file(path)
    except ValueError as error:
        raise DataError(f"{path}: {error}", "fix the file, or move it away") from error
    return found if isinstance(found, dict) else {}


def build_model_card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    metadata = yaml.safe_dump(_build_metadata(facts), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{metadata}---\n", f"# {facts.name.rpartition('/')[2]}\n", _describe_origin(facts)]
    parts += ["## Use\n", _describe_use(facts)]
    if facts.config:
        parts += ["## Training\n", _format_table(("", ""), _list_training_rows(facts)), _describe_data(facts)]
    measured = {key: value for key in _RESULTS if (value := to_finite_number(facts.evaluation.get(key))) is not None}
    if measured:
        rows = [(_RESULTS[key], f"{value:.4g}") for key, value in measured.items()]
        parts += ["## Results\n", _format_table((f"after step {facts.evaluation['step']:,}", ""), rows)]
    if changed := _list_changed_settings(facts):
        recipe = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
        heading = f"Those that differ from the defaults of `anabatic {facts.command}`:"
        parts += ["## Settings\n", f"{heading}\n\n```yaml\n{recipe}```\n"]
    return "\n".join(parts)


def _build_metadata(facts: CardFacts) -> dict[str, Any]:
    found: dict[str, Any] = {"license": facts.license} if facts.license else {}
    if facts.base_model:
        relation = "adapter" if facts.is_adapter else "finetune"
        found |= {"base_model": facts.base_model, "base_model_relation": relation}
    found["library_name"] = "peft" if facts.is_adapter else "transformers"
    if facts.command != "reward":
        found["pipeline_tag"] = "text-generation"
    if names := [name for name, _, is_here in _list_sources(facts) if is_here]:
        found["datasets"] = names
    found["tags"] = ["anabatic", *([facts.command] if facts.command else []), *(["lora"] if facts.is_adapter else [])]
    return found


def _describe_origin(facts: CardFacts) -> str:
    method = _METHODS.get(facts.command, "training")
    base = f" of [{facts.base_model}]({_PAGES[facts.hub]}/{facts.base_model})" if facts.base_model else ""
    kind = "An adapter" if facts.is_adapter else "A model"
    return f"{kind} made by {method}{base} with anabatic {__version__}.\n"


def _describe_use(facts: CardFacts) -> str:
    library = "transformers" if facts.hub == "huggingface" else "modelscope"
    if facts.is_adapter:
        base = facts.base_model or "BASE_MODEL"
        adapter = f'"{facts.name}"' if facts.hub == "huggingface" else f'snapshot_download("{facts.name}")'
        lines = [
            "from peft import PeftModel",
            f"from {library} import AutoModelForCausalLM, AutoTokenizer, snapshot_download"
            if facts.hub == "modelscope"
            else f"from {library} import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")',
            f'base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {adapter})",
        ]
    else:
        kind = "AutoModelForSequenceClassification" if facts.command == "reward" else "AutoModelForCausalLM"
        lines = [
            f"from {library} import {kind}, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")',
            f'model = {kind}.from_pretrained("{facts.name}", dtype="auto")',
        ]
    code = "\n".join(lines)
    hub = "" if facts.hub == "huggingface" else "ANABATIC_HUB=modelscope "
    commands = "\n".join(f"{hub}anabatic {command} -m {facts.name}" for command in ("chat", "serve"))
    return f"```python\n{code}\n```\n\n```bash\n{commands}\n```\n"


def _list_training_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    config, summary = facts.config, facts.summary
    yield "method", _METHODS.get(facts.command, facts.command)
    lora = config.get("lora")
    if facts.is_adapter and isinstance(lora, dict):
        yield "adapter", f"rank {lora.get('r')}"
    steps, tokens = (to_finite_number(summary.get(key)) for key in ("steps", "tokens"))
    if steps is not None:
        yield "length", f"{steps:,.0f} steps" + ("" if tokens is None else f", {format_count(tokens)} tokens")
    batch = config.get("batch")
    if isinstance(batch, dict):
        yield "sequence length", str(batch.get("seq_len") or "default")
        yield "tokens per step", str(batch.get("global_batch_tokens") or "default")
    if summary.get("device"):
        yield "devices", f"{summary.get('world_size', 1)} x {summary['device']}, {summary.get('dtype') or 'fp32'}"
    if to_finite_number(summary.get("seconds")) is not None:
        yield "time", format_duration(summary["seconds"])
    if not summary.get("finished"):
        yield "state", "not finished: the model is of an intermediate step"


def _describe_data(facts: CardFacts) -> str:
    rows = [f"{name} ({more})" if more else name for name, more, _ in _list_sources(facts)]
    return "Data: " + "; ".join(rows) + "\n" if rows else ""


def _list_sources(facts: CardFacts) -> Iterator[tuple[str, str, bool]]:
    """Yield name and details of the training data, and whether it is a data set of the hub of the card.

    Of files it is the last part of their path alone.
    """
    data = facts.config.get("data")
    specs = data.get("train") if isinstance(data, dict) else None
    for spec in specs if isinstance(specs, list) else ():
        if not is_dataset_spec(str(spec)):
            yield Path(sources.parse_source(str(spec)).path).name, "", False
            continue
        name, _, _ = split_spec(str(spec))
        record = facts.datasets.get(str(name)) or {}
        commit = str(record.get("commit") or name.revision)[:12]
        details = {"split": record.get("split") or name.split, "commit": commit, "license": record.get("license")}
        shown = ", ".join(f"{key} {value}" for key, value in details.items() if value)
        yield name.repo, shown, name.scheme == _SCHEMES[facts.hub]


def _list_changed_settings(facts: CardFacts) -> dict[str, Any]:
    command = command_table.find_training_command(facts.config)
    if command is None:
        return {}
    defaults = settings.default_tree(command.import_job_class())
    return _changed(facts.config, defaults, _SETTINGS_LEFT_OUT)


def _changed(tree: Mapping[str, Any], defaults: Mapping[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key in left_out:
            continue
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            value = _changed(value, default, ())
            if value:
                found[key] = value
        elif value != default:
            found[key] = _without_folders(value)
    return found


def _without_folders(value: Any) -> Any:
    """Return a setting without the folders of a path: `/data/me/rewards.py:f` becomes `rewards.py:f`."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if not isinstance(value, str) or "/" not in value or paths.is_hub_id(value):
        return value
    return value.rstrip("/").rpartition("/")[2]


def _format_table(heading: tuple[str, str], rows: Any) -> str:
    lines = [f"| {one} | {two} |" for one, two in (heading, ("---", "---"), *rows)]
    return "\n".join(lines) + "\n"
