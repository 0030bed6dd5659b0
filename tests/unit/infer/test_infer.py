"""`anabatic infer` in this process: order, resuming, processes, bad rows, checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest

from anabatic.config.chat import Sampling
from anabatic.config.infer import Batching, InferJob
from anabatic.config.sections.common import DeviceSettings
from anabatic.core.errors import ConfigError, DataError
from anabatic.models.pretrained import save_model
from anabatic.recipes.batch_inference import run

ROWS = [{"query": f"number {n} " + "x" * (7 * n % 40)} for n in range(23)]


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    save_model(model, path, tokenizer)
    return path


def rows_file(folder, rows=ROWS, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job(folder, inputs, out, **more):
    settings = dict(
        model=str(folder),
        inputs=[inputs],
        out=str(out),
        batching=Batching(batch=4),
        sampling=Sampling(temperature=1.0, seed=3, max_new_tokens=9),
        device=DeviceSettings(type="cpu", threads=1),
    )
    return InferJob(**{**settings, **more})


def answers(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The answers of an undisturbed run."""
    place = tmp_path_factory.mktemp("whole")
    assert run(job(folder, rows_file(place), place / "a.jsonl")) == 0
    found = answers(place / "a.jsonl")
    assert [row["messages"][0]["content"] for row in found] == [row["query"] for row in ROWS]
    assert sorted(path.name for path in place.iterdir()) == ["a.jsonl", "rows.jsonl"]
    return [row["response"] for row in found]


def test_a_stopped_job_goes_on_where_it_was(folder, whole, tmp_path):
    broken = [*ROWS[:15], *[{"query": "y" * 500}] * 2, *ROWS[17:]]
    rows, out = rows_file(tmp_path, broken), tmp_path / "a.jsonl"
    with pytest.raises(DataError, match=r"prompts: 2 of \d+ rows .* first .*rows.jsonl: line 16"):
        run(job(folder, rows, out))
    part = tmp_path / "a.jsonl.part-0-of-1"
    begun = len(part.read_text().splitlines()) - 1
    assert 0 < begun < 15
    with open(part, "a") as file:
        file.write('{"row": torn')
    with pytest.raises(ConfigError, match="was begun with sampling"):
        run(job(folder, rows, out, sampling=Sampling(temperature=0.0)))
    rows_file(tmp_path)
    assert run(job(folder, rows, out)) == 0
    assert [row["response"] for row in answers(out)] == whole
    assert not part.exists()
    with pytest.raises(ConfigError, match="is there already"):
        run(job(folder, rows, out))
    assert run(job(folder, rows, out, resume="never", sampling=Sampling(temperature=0.0, max_new_tokens=1))) == 0
    assert len(answers(out)) == len(ROWS)


def test_processes_share_the_rows(folder, whole, tmp_path, monkeypatch):
    rows, out = rows_file(tmp_path), tmp_path / "a.jsonl"
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 1, 0):  # the first one puts the parts together
        monkeypatch.setenv("RANK", str(rank))
        assert run(job(folder, rows, out)) == 0
    for rank in (2, 1, 0):  # fewer rows than processes
        monkeypatch.setenv("RANK", str(rank))
        assert run(job(folder, rows_file(tmp_path, ROWS[:2], "two.jsonl"), tmp_path / "two_a.jsonl")) == 0
    assert [row["response"] for row in answers(tmp_path / "two_a.jsonl")] == whole[:2]
    assert [row["response"] for row in answers(out)] == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "rows.jsonl", "two.jsonl", "two_a.jsonl"]


def test_bad_rows_fail_before_the_model_is_asked_or_are_passed_over(folder, whole, tmp_path):
    rows, out = rows_file(tmp_path, [*ROWS[:3], {"x": 1}, *ROWS[4:], {"query": "z" * 900}]), tmp_path / "a.jsonl"
    with pytest.raises(DataError, match="line 4: nothing is asked"):
        run(job(folder, rows, out))
    assert run(job(folder, rows, out, on_bad_row="skip")) == 0
    assert [row["response"] for row in answers(out)] == [*whole[:3], *whole[4:]]
    long = rows_file(tmp_path, [*ROWS[:3], {"query": "z" * 900}], "long.jsonl")
    assert run(job(folder, long, tmp_path / "l.jsonl")) == 0  # one is skipped, whatever the share
    assert [row["response"] for row in answers(tmp_path / "l.jsonl")] == whole[:3]
    many = rows_file(tmp_path, [*ROWS[:3], *[{"query": "z" * 900}] * 2], "many.jsonl")
    with pytest.raises(DataError, match=r"prompts: 2 of 5 rows .40.00%. are longer than") as caught:
        run(job(folder, many, tmp_path / "m.jsonl"))
    assert caught.value.hint == "pass over all of them with --long-share 0.4"
    assert run(job(folder, many, tmp_path / "m.jsonl", long_share=0.4)) == 0
    empty = rows_file(tmp_path, [], "empty.jsonl")
    with pytest.raises(DataError, match="there is no row"):
        run(job(folder, empty, tmp_path / "b.jsonl"))


def test_raw_text_labels_and_quantised_weights(folder, tmp_path):
    rows = rows_file(tmp_path, [{"text": "once"}, {"prompt": "once", "response": "upon"}])
    out = tmp_path / "a.jsonl"
    run(job(folder, rows, out, raw=True, sampling=Sampling(temperature=0.0, max_new_tokens=4)))
    text, prompt = answers(out)
    assert text["response"] == prompt["response"]
    assert (text["text"], prompt["label"]) == ("once", "upon")
    run(job(folder, rows, tmp_path / "q.jsonl", quantize="int8", sampling=Sampling(temperature=0.0, max_new_tokens=4)))
    assert len(answers(tmp_path / "q.jsonl")) == 2
    turns = rows_file(tmp_path, [{"query": "a", "history": [["b", "c"]]}], "turns.jsonl")
    with pytest.raises(DataError, match="line 1: 3 turns, and raw is on"):
        run(job(folder, turns, tmp_path / "c.jsonl", raw=True))


def test_checkpoints_that_are_not_there(folder, tmp_path):
    rows = rows_file(tmp_path)
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(DataError, match="checkpoint-11 does not exist.*checkpoint-10"):
        run(job("", rows, tmp_path / "a.jsonl", ckpt_dir=str(tmp_path / "checkpoint-11")))
    with pytest.raises(DataError, match="manifest.json cannot be read"):
        run(job("", rows, tmp_path / "b.jsonl", ckpt_dir=str(tmp_path / "checkpoint-10")))
    assert not list(tmp_path.glob("*.part-*"))
    run(job("", rows, tmp_path / "c.jsonl", ckpt_dir=str(folder)))
    assert len(answers(tmp_path / "c.jsonl")) == len(ROWS)


def test_a_cache_that_does_not_fit_says_so(folder, tmp_path):
    rows = rows_file(tmp_path)
    with pytest.raises(DataError, match="cache_gib is 1e.06, and .* are free"):
        run(job(folder, rows, tmp_path / "a.jsonl", batching=Batching(cache_gib=1e6)))
    with pytest.raises(DataError, match="the cache has room for"):
        run(job(folder, rows, tmp_path / "b.jsonl", batching=Batching(cache_gib=1e-6)))


def test_a_part_of_other_processes_or_that_is_none_is_not_gone_on_with(folder, tmp_path):
    rows, out = rows_file(tmp_path), tmp_path / "a[1].jsonl"
    other = tmp_path / "a[1].jsonl.part-0-of-16"  # whose name also holds -of-1
    other.write_text('{"job": {}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="was begun by another number of processes than 1"):
        run(job(folder, rows, out))
    other.unlink()
    for words in ("my notes\n", "[1]\n", '{"job": 1}\n', "[" * 100_000 + "\n"):
        part = tmp_path / "a[1].jsonl.part-0-of-1"
        part.write_text(words, encoding="utf-8")
        with pytest.raises(ConfigError, match="is no part of answers"):
            run(job(folder, rows, out))
        assert part.read_text(encoding="utf-8") == words


def test_a_classifier_is_not_asked_to_write(folder, tmp_path):
    named = tmp_path / "classifier"
    shutil.copytree(folder, named)
    (named / "classifier.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a classifier"):
        run(job(named, rows_file(tmp_path), tmp_path / "a.jsonl"))
