"""On more and more devices: what may not happen on paper, and collectives against a ring counted by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.cli.app import main
from anabatic.device.table import CHIPS, find_chip
from anabatic.plan import cost_model, device_scaling, model_shape, step_time
from anabatic.plan.training_setup import TrainingSetup

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
RATES = cost_model.get_chip_rates(CHIP)
NUMBERS = [8 << power for power in range(10)]
SVG = "{http://www.w3.org/2000/svg}"


def plan(words: list[str]) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *words])
    return int(caught.value.code or 0)


def flat_ring_ns(kind: str, total: float, ranks: int) -> float:
    """One ring through all devices of several servers: every step waits for the slowest link, a device's network."""
    turns = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[kind] * (ranks - 1)
    return cost_model.LAUNCH_COLLECTIVE_NS + turns * (cost_model.NETWORK_NS + 1e9 * total / ranks / RATES.network)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.sampled_from([16, 64, 512, 4096]),
    st.floats(1e3, 1e10),
)
def test_inside_first_is_never_slower_than_one_ring_through_all(kind: str, ranks: int, total: float) -> None:
    assert cost_model.estimate_collective_ns(RATES, kind, total, ranks) <= flat_ring_ns(kind, total, ranks)


@given(st.sampled_from([kind for kind in cost_model.COLLECTIVES if kind not in ("send", "recv")]), st.floats(0, 1e10))
def test_more_servers_take_longer(kind: str, total: float) -> None:
    times = [cost_model.estimate_collective_ns(RATES, kind, total, ranks) for ranks in NUMBERS]
    assert times == sorted(times)


def test_rounds_are_the_logarithm_of_the_servers() -> None:
    for servers, rounds in ((2, 1), (3, 2), (4, 2), (5, 3), (512, 9)):
        found = cost_model.estimate_collective_ns(RATES, "barrier", 0.0, 8 * servers)
        assert found == cost_model.LAUNCH_COLLECTIVE_NS + rounds * cost_model.NETWORK_NS


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-72B"]),
    st.sampled_from(["ddp", "zero2", "zero3"]),
    st.sampled_from(["full", "lora"]),
    st.sampled_from(CHIPS),
    st.sampled_from([512, 8192]),
)
def test_what_more_devices_can_give(model: str, strategy: str, tuner: str, chip, micro: int) -> None:  # type: ignore[no-untyped-def]
    shape, _ = model_shape.get_named_shape(model)
    rates = cost_model.get_chip_rates(chip)
    times = [
        step_time.estimate_step_time(
            TrainingSetup(shape, strategy=strategy, tuner=tuner, ranks=ranks, micro_tokens=micro, seq_len=512), rates
        )  # type: ignore[arg-type]
        for ranks in [rates.server << power for power in range(10)]
    ]
    for less, more in zip(times, times[1:], strict=False):
        saved = less.update - more.update  # parts of the optimizer get smaller, nothing else does
        assert more.total_seconds >= less.total_seconds - saved - 1e-12
        assert more.collectives >= less.collectives * (1 - 1e-12) and more.exposed_collectives <= more.collectives * (
            1 + 1e-12
        )
        assert strategy != "ddp" or saved == 0.0


def test_numbers_of_devices() -> None:
    assert device_scaling.list_device_counts(8, 64, 1) == [1, 2, 4, 8, 16, 32, 64]
    assert device_scaling.list_device_counts(6, 30, 1) == [1, 2, 4, 6, 12, 24]
    assert device_scaling.list_device_counts(8, 32, 4) == [4, 8, 16, 32]
    assert device_scaling.list_device_counts(16, 4096, 1)[-1] == 4096


SFT = ["--", "sft", "--data", "rows.jsonl", "--batch.seq-len", "512", "--model"]


def test_a_divided_step_and_one_that_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--scale", "1024"]
    assert plan([*words, *SFT, "Qwen/Qwen2.5-0.5B", "--batch.global-batch-tokens", "262144"]) == 0
    strong = json.loads(capsys.readouterr().out)
    assert {row["tokens"] for row in strong["rows"]} == {262_144} and "strong scaling" in strong["held"]
    assert [row["devices"] for row in strong["rows"]] == [1 << power for power in range(10)]  # 512 rows of 512
    shares = [row["efficiency"] for row in strong["rows"]]
    assert all(share <= 1 + 1e-9 for share in shares) and shares[-1] < 0.5
    assert plan([*words, *SFT, "Qwen/Qwen2.5-7B"]) == 0
    weak = json.loads(capsys.readouterr().out)
    rows = weak["rows"]
    assert "weak scaling" in weak["held"] and rows[0]["devices"] > 1 and rows[-1]["devices"] == 1024
    assert len({row["tokens"] / row["devices"] for row in rows}) == 1
    assert len({(row["strategy"], row["recompute"], row["micro_batch_tokens"]) for row in rows}) == 1
    assert all(0.9 < row["efficiency"] < 1.5 for row in rows)  # above 1: the optimizer is divided further
    assert plan(["--scale", "1024", *SFT, "Qwen/Qwen2.5-7B"]) == 0
    assert f"left out: {', '.join(str(1 << n) for n in range(rows[0]['devices'].bit_length() - 1))} devices" in (
        capsys.readouterr().out
    )
    staged = ["--parallel.pipeline", "4", "--batch.micro-batch-tokens", "8192", "--batch.global-batch-tokens", "262144"]
    assert plan([*words, *SFT, "Qwen/Qwen2.5-7B", "--tuner", "lora", *staged]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["waiting"] > 0.1  # stages for each other
    assert plan(["--scale", "1", *SFT, "Qwen/Qwen2.5-72B"]) == 1
    assert "fits on no number of Ascend910B3" in capsys.readouterr().err
    assert plan(["--json", "--scale", "1", *SFT, "Qwen/Qwen2.5-72B"]) == 1
    assert json.loads(capsys.readouterr().out) == {"chip": "Ascend910B3", "held": None, "rows": []}


@pytest.mark.parametrize("kind", [["--sweep", "--npus", "8"], ["--scale", "64"], ["--npus", "1"]])
def test_pictures_are_svg_with_names_and_units(kind: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    assert plan([*kind, "--plot", str(file), *SFT, "Qwen/Qwen2.5-7B"]) in (0, 1)  # on one NPU nothing fits
    root = ET.parse(file).getroot()
    assert root.tag == f"{SVG}svg"
    words = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    expected = (
        ("devices", "speed-up, times", "efficiency", "waiting for links")
        if "--scale" in kind
        else ("GiB", "tokens/s", "zero3")
    )
    assert all(word in words for word in (expected if kind[-1] != "1" else expected[:2]))
    numbers = [float(text.get("x", "nan")) for text in root.iter(f"{SVG}text")]
    assert all(0 <= number <= float(root.get("width", 0)) for number in numbers)
    assert "prefers-color-scheme:dark" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--scale", "0"], "--scale is 0"),
        (["--scale", "64", "--nodes", "2"], "--scale goes with"),
        (["--scale", "64", "--sweep"], "--scale goes with"),
        (["--plot", "plan.png"], "--plot is 'plan.png'"),
    ],
)
def test_what_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([*words, *SFT, "Qwen/Qwen2.5-0.5B"]) == 2
    said = capsys.readouterr().err
    assert why in said and "hint: " in said


@pytest.mark.parametrize("kind", [["--sweep"], ["--scale", "8"]])
def test_a_picture_that_cannot_be_written(kind: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert plan([*kind, "--plot", str(tmp_path / "file" / "plan.svg"), *SFT, "Qwen/Qwen2.5-0.5B"]) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said and "--plot" in said and "--out" not in said


def test_what_the_update_and_frozen_blocks_cost() -> None:
    """Muon's products counted by hand; below the blocks that are trained nothing goes back."""
    shape, _ = model_shape.get_named_shape("Qwen2.5-0.5B")
    base = {"shape": shape, "micro_tokens": 8192, "seq_len": 512}
    adam, muon, freeze = (
        step_time.estimate_step_time(TrainingSetup(**base, **more), RATES)
        for more in ({}, {"muon": True}, {"tuner": "freeze"})
    )  # type: ignore[arg-type]
    products = sum(
        5 * (4.0 * min(one) ** 2 * max(one) + 2.0 * min(one) ** 3)
        for one in ((layer.inputs, layer.outputs) for layer in shape.linears)
    )
    assert muon.update >= shape.layers * products / RATES.half_flops > 0.5 * muon.update
    assert adam.update == pytest.approx((140 + 4 + 6) * shape.params / RATES.memory)
    assert freeze.compute < 0.6 * adam.compute
