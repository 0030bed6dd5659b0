"""Settings that change what a model learns are converted, or left out by name with what follows; once each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import settings, validation, yaml_reader
from anabatic.convert import converter, peer_tables

SWIFT = "swift sft --model M --dataset a.jsonl"
FACTORY = "llamafactory-cli train --stage sft --model_name_or_path M --dataset a.json"
OWN = "torchrun train.py --model_name_or_path M --dataset a.json"
GRPO = "swift rlhf --rlhf_type grpo --model M --dataset a.jsonl"


def convert(line: str, command: str | None = None) -> tuple[Any, list[str]]:
    """Return the job of a command, and the notes."""
    peer = {"swift": "swift", "llam": "llamafactory"}.get(line.split()[0][:5].rstrip("a"), "deepspeed")
    made = converter.convert_command(peer, [line], command)
    name = made.text.splitlines()[0].partition("anabatic ")[2].removesuffix(" -c FILE")
    return settings.build_job(name, yaml_reader.parse_yaml(made.text, "printed").tree, "printed"), made.messages


def value_of(job: Any, key: str) -> Any:
    """Return a setting by its dotted name."""
    for part in key.split("."):
        job = getattr(job, part)
    return job


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (f"{FACTORY} --moe_aux_loss_coef 0.001", "optim.router_aux_loss", 0.001),
        (f"{SWIFT} --router_aux_loss_coef 0.002", "optim.router_aux_loss", 0.002),
        (f"{SWIFT} --loss_scale last_round", "last_turn_only", True),
        (f"{SWIFT} --loss_scale all", "train_on_inputs", True),
        (f"{SWIFT} --freeze_vit false", "vision.train", ["language", "tower"]),
        (f"{SWIFT} --max_pixels 1003520", "vision.max_pixels", 1003520),
        (f"{FACTORY} --freeze_multi_modal_projector false", "vision.train", ["language", "projector"]),
        (f"{FACTORY} --freeze_vision_tower true --image_min_pixels 1024", "vision.min_pixels", 1024),
        (f"{FACTORY} --media_dir pictures", "data.media", "pictures"),
        (f"{FACTORY} --mask_history true", "last_turn_only", True),
        (f"{FACTORY} --train_on_prompt true", "train_on_inputs", True),
        (f"{OWN} --assistant_only_loss false", "train_on_inputs", True),
        (f"{OWN} --truncation_mode keep_end", "truncation_strategy", "left"),
        (f"{OWN} --torch_compile true", "device.compile", "on"),
        (f"{OWN} --chat_template_path chatml", "chat_template", "chatml"),
        (f"{SWIFT} --strict false", "data.on_bad_row", "skip"),
        (f"{FACTORY} --use_swanlab true --report_to tensorboard", "log.sinks", ["tensorboard", "swanlab"]),
        (f"{FACTORY} --use_swanlab true", "log.sinks", ["swanlab"]),
        (f"{GRPO} --scale_rewards none", "advantage", "mean"),
        (f"{GRPO} --overlong_filter true", "mask_truncated", True),
        (GRPO, "mask_truncated", False),
        (GRPO, "kl_coef", 0.04),
        (GRPO, "sampling.max_new_tokens", 512),
        (f"{GRPO} --max_completion_length 99", "sampling.max_new_tokens", 99),
        (f"{SWIFT.replace('sft', 'rlhf')} --rlhf_type rm --center_rewards_coefficient 0.01",
         "center_rewards_coefficient", 0.01),
        (f"""{OWN} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{"min_lr_rate": 0.2}}'""",
         "schedule.final_lr_ratio", 0.2),
        (f"""{OWN} --lr_scheduler_type cosine_with_min_lr --learning_rate 1e-4
         --lr_scheduler_kwargs '{{"min_lr": 1e-5}}'""".replace("\n", " "), "schedule.final_lr_ratio", 0.1),
    ],
)  # fmt: skip
def test_what_has_a_counterpart(line: str, key: str, value: Any) -> None:
    job, notes = convert(line)
    assert value_of(job, key) == value
    assert not [note for note in notes if note.startswith("not known")]


@pytest.mark.parametrize(
    ("line", "option", "word"),
    [
        (FACTORY, "--default_system hi", "rows without a system message get no system prompt"),
        (SWIFT, "--system hi", "rows without a system message get no system prompt"),
        (FACTORY, "--enable_thinking False", "decides about `<think>` blocks"),
        (SWIFT, "--enable_thinking false", "decides about `<think>` blocks"),
        (SWIFT, "--loss_scale default+ignore_empty_think", "every target token counts the same"),
        (SWIFT, "--loss_scale hermes", "every target token counts the same"),
        (SWIFT, "--response_prefix x", "without this text"),
        (SWIFT, "--agent_template hermes", "as the model's own chat template shows them"),
        (FACTORY, "--tool_format qwen", "as the model's own chat template shows them"),
        (SWIFT, "--use_chat_template false", "conversations are always shown by a chat template"),
        (SWIFT, "--task_type seq_cls", "no head for classes"),
        (SWIFT, "--dataset_shuffle false", "rows are shuffled by seed"),
        (SWIFT, "--train_dataloader_shuffle false", "rows are shuffled by seed"),
        (FACTORY, "--disable_shuffling true", "rows are shuffled by seed"),
        (FACTORY, "--neftune_noise_alpha 5", "embeddings get no noise"),
        (FACTORY, "--train_from_scratch true", "begins with the weights of the model"),
        (FACTORY, "--add_tokens a", "no token is added"),
        (FACTORY, "--use_dft_loss true", "every target token counts the same"),
        (SWIFT, "--model_revision v2", "other weights are trained"),
        (OWN, "--loss_type dft", "every target token counts the same"),
        (OWN, "--lora_bias all", "adapters have no biases"),
    ],
)
def test_what_has_none_is_left_out_by_name(line: str, option: str, word: str) -> None:
    _, notes = convert(f"{line} {option}")
    told = [note for note in notes if option.split()[0] in note]
    assert len(told) == 1
    assert told[0].startswith("left out: ")
    assert word.replace("every target", "target") in told[0].replace("every target", "target").replace("of every", "of")


@pytest.mark.parametrize(
    "option",
    ["--use_chat_template true", "--dataset_shuffle true", "--task_type causal_lm", "--loss_scale default"],
)
def test_what_is_so_anyway_needs_no_word(option: str) -> None:
    _, notes = convert(f"{SWIFT} {option}")
    assert not [note for note in notes if option.split()[0] in note]


def test_packing_of_others_is_no_packing_of_ours() -> None:
    job, notes = convert(f"{FACTORY} --packing true")
    assert job.batch.packing
    assert any("rows of a batch never attend to each other" in note for note in notes)


def test_floors_of_rates_are_an_object() -> None:
    for typed in ("1", "'{torn'"):
        with pytest.raises(converter.ConfigError, match="lr_scheduler_kwargs"):
            convert(f"{OWN} --lr_scheduler_type cosine --lr_scheduler_kwargs {typed}")


ALL = {
    peer: sorted(
        {
            name
            for file in (peer, "transformers", "launch")
            for table, rows in peer_tables.load_tables(file).tables.items()
            if table not in ("commands", "trainers")
            for row in rows
            for name in row.theirs
            if len(name) > 1 and (row.how in ("lost", "told") or (row.how == "values" and not row.ours))
            if not row.only or "sft" in row.only
        }
    )
    for peer in ("swift", "llamafactory")
}


@pytest.mark.parametrize("peer", sorted(ALL))
def test_every_option_that_is_left_out_is_named_once(peer: str) -> None:
    line = {"swift": SWIFT, "llamafactory": FACTORY}[peer]
    names = [name for name in ALL[peer] if not name.isupper()]
    made = converter.convert_command(peer, [" ".join([line, *(f"--{name} odd" for name in names)])])
    for name in names:
        told = [note for note in made.messages if f"--{name} odd" in note]
        assert len(told) == 1, (name, told)
        assert len(told[0].partition("odd")[2].strip(": .")) > 10, told


def test_settings_of_ours_that_have_a_counterpart() -> None:
    """Every setting that a table names exists; those of what is learned that none names are listed here."""
    named = {
        key
        for peer in sorted(file.stem for file in peer_tables.TABLES_FOLDER.glob("*.yaml"))
        for row in peer_tables.load_tables(peer).all_rows()
        for key in (*row.ours, *row.sets)
    }
    job = converter.command_table.COMMANDS.find_row("sft").import_job_class()
    learned = ("optim.", "schedule.", "lora.", "batch.", "data.", "curriculum.", "freeze.")
    own = {key for key, _ in validation.iter_settings(job) if key.startswith(learned)}
    without = {
        "optim.momentum", "optim.on_bad_step", "optim.spike", "optim.max_rewinds", "schedule.minutes",
        "curriculum.by", "curriculum.field", "curriculum.stages", "freeze.train", "data.long_share",
    }  # fmt: skip
    assert own - named == without


def test_lists_of_nothing_are_nothing(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"model": "M", "dataset": ["a.jsonl"], "model_name": [None, None], "columns": {}}))
    made = converter.convert_command("swift", [str(file)])
    assert not [note for note in made.messages if "model_name" in note or "columns" in note]


@pytest.mark.parametrize("case", ["c2-hub-swift", "c3-aux", "c4-default-system"])
def test_the_samples(case: str, shared_data: Path) -> None:
    listed = shared_data / "outside_cases" / "cases.jsonl"
    if not listed.is_file():
        pytest.skip("shared/data/outside_cases is not beside the checkout")
    rows = {row["id"]: row for row in map(json.loads, listed.read_text(encoding="utf-8").splitlines())}
    line = rows[case]["command"].partition("'")[2].rstrip("'")
    job, notes = convert(line)
    if case == "c2-hub-swift":
        assert job.data.train == ["ms:AI-ModelScope/alpaca-gpt4-data-zh:train#500"]
    elif case == "c3-aux":
        assert job.optim.router_aux_loss == 0.001
    else:
        assert len([note for note in notes if note.startswith("left out: --default_system hi")]) == 1
