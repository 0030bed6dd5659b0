"""Defaults < files < flags, and back to YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.loading import settings as settings_module
from anabatic.config.loading import yaml_reader
from anabatic.config.loading.validation import UntypedText
from anabatic.config.pipeline import PipelineJob, PipelineStage
from anabatic.config.pretrain import PretrainJob
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError

SFT = {"model": "m", "data": {"train": ["a"]}}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_files_and_flags_win(tmp_path: Path) -> None:
    base = write(tmp_path / "a.yaml", "model: m\ndata: {train: [a, b]}\noptim: {lr: 1.0, beta1: 0.5}\nseed: 1\n")
    over = write(tmp_path / "b.yaml", "data: {train: [c]}\noptim: {lr: 2.0}\n")
    job = settings_module.load_job(
        "sft", [base, over], {"optim": {"lr": UntypedText("3e-5")}, "seed": UntypedText("7")}
    )
    assert isinstance(job, SftJob)
    assert (job.data.train, job.optim.lr, job.optim.beta1, job.seed) == (["c"], 3e-5, 0.5, 7)


def test_a_section_starts_from_the_commands_own_defaults() -> None:
    job = settings_module.build_job("sft", {**SFT, "optim": {"lr": 1e-5}}, "r")
    assert (job.optim.name, job.optim.beta2) == ("adamw", 0.999)
    assert settings_module.build_job("pretrain", {"tokenizer": "t", "data": {"train": ["a"]}}, "r").optim.name == "muon"


def test_null_gives_an_optional_setting_its_default_back(tmp_path: Path) -> None:
    base = write(tmp_path / "a.yaml", "model: m\ndata: {train: [a]}\nschedule: {epochs: 2}\n")
    over = write(tmp_path / "b.yaml", "schedule: {epochs: null, max_steps: 5}\n")
    schedule = settings_module.load_job("sft", [base, over]).schedule
    assert (schedule.epochs, schedule.max_steps) == (None, 5)


def test_errors_name_file_line_and_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "model: m\nschedule:\n  max_steps: 1.5\n")
    with pytest.raises(ConfigError) as caught:
        settings_module.load_job("sft", [path])
    assert str(caught.value) == f"{path}:3: schedule.max_steps is 1.5, expected a whole number"


def test_the_first_wrong_file_is_named_even_if_a_later_one_overrides(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "seed: x\n")
    second = write(tmp_path / "b.yaml", "seed: 1\nmodel: m\ndata: {train: [a]}\n")
    with pytest.raises(ConfigError, match="a.yaml:1: seed"):
        settings_module.load_job("sft", [first, second])


def test_build_names_its_origin() -> None:
    with pytest.raises(ConfigError, match=r"^stages.x.job: seed is 1.5, expected a whole number$"):
        settings_module.build_job("sft", {**SFT, "seed": 1.5}, "stages.x.job")
    with pytest.raises(ConfigError, match=r"^stages.x.job: batch.seq_len is 0$"):
        settings_module.build_job("sft", {**SFT, "batch": {"seq_len": 0}}, "stages.x.job")
    with pytest.raises(ConfigError, match=r'unknown command "pretrian"\. Did you mean "pretrain"\?'):
        settings_module.build_job("pretrian", {}, "r")


def test_pipeline_stages_are_built_and_dumped() -> None:
    tree = {"vars": {"a": ""}, "stages": {"x": {"command": "sft", "job": {"model": "${y}", "seed": 1}}}}
    job = settings_module.build_job("run", tree, "r")
    assert isinstance(job, PipelineJob) and isinstance(job.stages["x"], PipelineStage)
    assert settings_module.build_job("run", yaml_reader.parse_yaml(settings_module.dump_job(job), "d").tree, "d") == job
    with pytest.raises(ConfigError, match=r'stages.x.comand is not a known setting. Did you mean "command"'):
        settings_module.build_job("run", {"stages": {"x": {"comand": "sft"}}}, "r")


FRACTION = st.floats(0.0, 0.5)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    tokenizer=TEXT,
    train=st.lists(TEXT, min_size=1, max_size=3),
    lr=st.none() | st.floats(1e-12, 1e3),
    steps=st.none() | st.integers(1, 10**9),
    ratios=st.tuples(FRACTION, FRACTION),
    compile=st.sampled_from(["auto", "on", "off"]),
    nproc=st.integers(1, 64),
    tie=st.none() | st.booleans(),
)
def test_dump_is_valid_input_and_equal(tokenizer, train, lr, steps, ratios, compile, nproc, tie) -> None:
    job = settings_module.build_job(
        "pretrain",
        {
            "tokenizer": tokenizer,
            "model": {"tie_embeddings": tie},
            "data": {"train": train},
            "optim": {"lr": lr},
            "schedule": {"max_steps": steps, "warmup_ratio": ratios[0], "decay_ratio": ratios[1]},
            "device": {"compile": compile, "nproc": nproc},
        },
        "r",
    )
    text = settings_module.dump_job(job)
    assert settings_module.build_job("pretrain", yaml_reader.parse_yaml(text, "dump").tree, "dump") == job
    assert isinstance(job, PretrainJob)


def test_a_value_out_of_range_names_its_place(tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text("model: m\ndata: {train: [a]}\nschedule:\n  max_steps: -3\n")
    above.write_text("log: {every: 5}\n")
    with pytest.raises(ConfigError, match=r"below.yaml:4: schedule.max_steps is -3"):
        settings_module.load_job("sft", [below, above])
    with pytest.raises(ConfigError, match=r"^--schedule.max-steps is 0"):
        settings_module.load_job("sft", [below], {"schedule": {"max_steps": UntypedText("0")}})


def test_variables_may_be_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("vars: {steps: 5, share: 0.5, on: true, later: }\nstages: {a: {command: eval}}\n")
    assert settings_module.load_job("run", [recipe]).vars == {"steps": "5", "share": "0.5", "on": "true", "later": ""}
    recipe.write_text("vars: {steps: [5]}\nstages: {a: {command: eval}}\n")
    with pytest.raises(ConfigError, match="vars.steps is a list"):
        settings_module.load_job("run", [recipe])
