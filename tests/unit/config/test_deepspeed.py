"""DeepSpeed files as settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.loading import deepspeed_json
from anabatic.config.sections.common import BatchSettings, Data, Optim, Parallel
from anabatic.config.sft import SftJob
from anabatic.core.errors import AnabaticError, ConfigError

ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": 8,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "eps": 1e-8, "torch_adam": True}},
    "comms_logger": {"enabled": False},
}


def job_with(source: str, **changes: object) -> SftJob:
    return SftJob(model="m", data=Data(train=["a"]), parallel=Parallel(deepspeed=source), **changes)  # type: ignore[arg-type]


def test_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO3))
    job, told, lost = deepspeed_json.apply_deepspeed(job_with(str(file), batch=BatchSettings(seq_len=2048)), 16)
    assert (job.parallel.strategy, job.parallel.offload, job.device.dtype) == ("zero3", "cpu", "bf16")
    assert (job.batch.micro_batch_tokens, job.batch.global_batch_tokens) == (8 * 2048, 16 * 8 * 2048)
    assert (job.optim.max_grad_norm, job.optim.beta2, job.optim.name) == (0.5, 0.98, "adamw")
    assert "parallel.strategy = zero3" in told
    assert lost.endswith("not used: zero_optimization.zero_hpz_partition_size, comms_logger")


@pytest.mark.parametrize(
    ("name", "strategy", "offload"),
    [
        ("zero0", "ddp", "none"),
        ("zero1", "zero2", "none"),
        ("default-zero2", "zero2", "none"),
        ("zero3", "zero3", "none"),
        ("zero3_offload", "zero3", "cpu"),
    ],
)
def test_names(name: str, strategy: str, offload: str) -> None:
    job, _, lost = deepspeed_json.apply_deepspeed(job_with(name), 2)
    assert (job.parallel.strategy, job.parallel.offload, lost) == (strategy, offload, "")


def test_the_recipe_and_the_file_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_clipping": 0.5}')
    with pytest.raises(ConfigError, match="optim.max_grad_norm is 2.0 in the recipe, .*ds.json says 0.5"):
        deepspeed_json.apply_deepspeed(job_with(str(file), optim=Optim(max_grad_norm=2.0)), 1)
    same, _, _ = deepspeed_json.apply_deepspeed(job_with(str(file), optim=Optim(max_grad_norm=0.5)), 1)
    assert same.optim.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds list"),
        ('{"zero_optimization": 3}', "ds.json: zero_optimization is 3"),
        ('{"zero_optimization": {"stage": 5}}', "ds.json: zero_optimization.stage is 5"),
        ('{"zero_optimization": {"stage": "three"}}', "zero_optimization is"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "ds.json: zero_optimization.offload_param.device is nvme",
        ),
        ('{"train_micro_batch_size_per_gpu": 0}', "train_micro_batch_size_per_gpu is 0"),
        ('{"train_micro_batch_size_per_gpu": true}', "train_micro_batch_size_per_gpu is true"),
        ('{"gradient_clipping": "much"}', "gradient_clipping is"),
        ('{"gradient_clipping": -1}', "optim.max_grad_norm is -1"),
        ('{"gradient_clipping": NaN}', "gradient_clipping is NaN"),
        ('{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}', "= 8"),
        ("{torn", "cannot be read as JSON"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        deepspeed_json.apply_deepspeed(job_with(str(file)), 2)


def test_hints_say_what_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text, hint in (
        ('{"zero_optimization": 3}', 'an object such as {"stage": 2} is expected'),
        ('{"train_batch_size": "x"}', "a whole number from 1 is expected"),
        ('{"optimizer": {"params": {"lr": "x"}}}', 'an object such as {"type": "AdamW"'),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            deepspeed_json.apply_deepspeed(job_with(str(file)), 2)
        assert caught.value.hint.startswith(hint)


def test_every_key_is_accounted_for() -> None:
    content = {
        "zero_optimization": {
            "stage": 0,
            "offload_optimizer": {"device": "cpu", "ratio": 0.3},
            "sub_group_size": "auto",
        },
        "fp16": {"enabled": "auto", "loss_scale_window": 1000},
        "optimizer": {"params": {"lr": "auto"}},
        "scheduler": "auto",
        "steps_per_print": 10,
    }
    made = deepspeed_json.translate_config(content, "ds.json")
    offload = "zero_optimization.offload_optimizer"
    assert made.unknown == [f"{offload} of stage 0", f"{offload}.ratio", "scheduler"]
    assert made.needless == ["zero_optimization.sub_group_size", "fp16.loss_scale_window", "steps_per_print"]
    assert made.auto == ["fp16.enabled", "optimizer.params.lr"]


def test_neither_file_nor_name() -> None:
    with pytest.raises(ConfigError, match='parallel.deepspeed is "zero9", which is no file'):
        deepspeed_json.apply_deepspeed(job_with("zero9"), 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*ZERO3, "fp16", "bfloat16"]), JSON))
def test_whatever_stands_in_a_file_is_an_error_or_settings(content: dict[str, object]) -> None:
    try:
        deepspeed_json.translate_config(content, "ds.json")
    except AnabaticError as error:
        assert error.hint
