"""Stages that run again: asked for, changed, broken, or with something that they made gone."""

from __future__ import annotations

import re
import shutil

import pytest

from anabatic.core.errors import ConfigError, DataError
from anabatic.recipes.pipeline import stage_plan
from unit.pipeline.bench import ALL, Bench


@pytest.mark.process
def test_from_and_only(bench: Bench) -> None:
    bench.run()
    bench.ran()
    assert bench.run(start="sft") == 0
    assert bench.ran() == ["sft", "talk"]
    assert bench.run(only=["base"]) == 0
    assert bench.ran() == ["base"]
    assert bench.run() == 0
    assert bench.ran() == ["sft", "talk"]  # made from an older base
    with pytest.raises(ConfigError, match='no stage "bas". Did you mean "base"'):
        bench.run(start="bas")
    with pytest.raises(ConfigError, match="both --from and --only"):
        bench.run(start="base", only=["base"])


@pytest.mark.process
def test_from_starts_over_where_the_plain_command_goes_on(bench: Bench) -> None:
    bench.behave(base="stop")
    assert bench.run() == 1
    (bench.out / "base" / "mine").touch()
    assert bench.run() == 1
    assert (bench.out / "base" / "mine").exists()
    bench.behave()
    assert bench.run(start="base") == 0
    assert not (bench.out / "base" / "mine").exists()
    assert (bench.out / "base.old" / "mine").exists()


@pytest.mark.process
def test_from_that_fails_half_way_is_finished_by_the_plain_command(bench: Bench) -> None:
    bench.run()
    bench.ran()
    bench.behave(sft="fail")
    assert bench.run(start="base") == 3
    assert bench.ran() == ["base", "sft"]
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["sft", "talk"]


@pytest.mark.process
def test_a_broken_stage_json_means_run_again(bench: Bench) -> None:
    bench.run()
    bench.ran()
    (bench.out / "tok" / "stage.json").write_text('{"state": "do')
    assert bench.run() == 0
    assert bench.ran() == ALL  # what was made from it may not fit the new one


@pytest.mark.process
@pytest.mark.parametrize("lost", ["tok/tokenizer.json", "base/best_model", "base/final_model/tokenizer.json"])
def test_what_a_stage_made_is_gone(bench: Bench, capsys: pytest.CaptureFixture[str], lost: str) -> None:
    bench.run()
    bench.ran()
    path = bench.out / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    capsys.readouterr()
    assert bench.run(dry_run=True) == 0
    first, _, file = lost.partition("/")
    assert re.search(rf"run   {first}: .*\({file}.* is missing\)", capsys.readouterr().err)
    assert bench.run() == 0
    assert bench.ran() == ALL[ALL.index(first) :] and path.exists()


@pytest.mark.process
def test_a_lost_model_with_checkpoints_is_made_from_them(bench: Bench) -> None:
    bench.run()
    bench.ran()
    (bench.out / "base" / "checkpoint-5").mkdir()
    shutil.rmtree(bench.out / "base" / "final_model")
    assert bench.run() == 0
    assert (bench.out / "base" / "checkpoint-5").is_dir() and not (bench.out / "base.old").exists()


@pytest.mark.process
def test_interrupted_after_a_change_and_back(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    bench.ran()
    changed = {"max_steps": 7}
    before = bench.tree["stages"]["base"]["job"]["schedule"]
    bench.tree["stages"]["base"]["job"]["schedule"] = changed
    bench.behave(base="stop")
    assert bench.run() == 1
    assert bench.ran() == ["base"]
    page = (bench.out / "report.html").read_text()
    states = re.findall(r"</i><bdi[^>]*>([^<]*)<", page)
    assert states.count("out of date") == 2 and states.count("up to date") == 1
    capsys.readouterr()
    bench.run(dry_run=True)
    assert "run   sft: " in capsys.readouterr().err

    bench.tree["stages"]["base"]["job"]["schedule"] = before
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]
    err = capsys.readouterr().err
    assert "not asked for" not in err and "asked for" not in err


def test_data_that_is_not_there_stops_before_the_first_stage(bench: Bench) -> None:
    (bench.root / "c.jsonl").rename(bench.root / "d.jsonl")
    with pytest.raises(DataError, match="stages.sft.job: c.jsonl: no such file or folder") as caught:
        bench.run()
    assert 'Did you mean "d.jsonl"?' in caught.value.hint
    assert bench.ran() == [] and not bench.out.exists()


@pytest.mark.process
def test_a_failure_does_not_push_out_an_earlier_result(bench: Bench) -> None:
    bench.run()
    for steps, how in (("6", "good"), ("7", "fail"), ("8", "fail"), ("9", "good")):
        bench.behave(base=how)
        bench.run(vars={"steps": steps})
    assert (bench.out / "base.old" / "final_model" / "config.json").is_file()


def test_files_of_earlier_stages_are_known_by_the_keys_of_these(bench: Bench) -> None:
    bench.tree["stages"]["sft"]["job"]["data"] = {"train": ["c.jsonl", "${talks}/rows.jsonl"]}
    bench.tree["stages"] = {
        "talks": {"command": "infer", "job": {"model": "m", "inputs": ["questions.jsonl"]}},
        **bench.tree["stages"],
    }

    def list_keys() -> dict[str, str]:
        return {stage.name: stage.cache_key for stage in stage_plan.plan_stages(bench.job(), {})}

    before = list_keys()
    made = bench.out / "talks" / "rows.jsonl"
    made.parent.mkdir(parents=True)
    made.write_text("{}\n")
    assert list_keys() == before
    bench.tree["stages"]["talks"]["job"]["model"] = "other"
    changed = list_keys()
    assert {name for name in before if changed[name] != before[name]} == {"talks", "sft", "talk"}
