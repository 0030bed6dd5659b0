"""`data stats` and `data check`: figures and findings of files, good, bad and hostile."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from anabatic.config.data_commands import DataCheckJob, DataStatsJob
from anabatic.config.sections.train_jobs import PictureData
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.data.readers.sources import parse_source, read_documents
from anabatic.recipes import data_check
from anabatic.recipes.data_check import Finding, check_sources
from anabatic.recipes.data_stats import LengthSummary, measure_sources, run
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from unit.recipes.bad_files import FILES_WITHOUT_A_GOOD_ROW

REAL = Path(__file__).resolve().parents[4] / "shared" / "data"


def chat(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_random_model(len(build_byte_tokenizer(folder))).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("lengths", [[7], [1, 2], list(range(100, 0, -1)), [5] * 1000 + [9]])
def test_quantiles_are_lengths_that_occur(lengths):
    found = LengthSummary.from_lengths(lengths)
    ordered = sorted(lengths)
    assert (found.min, found.max, found.total) == (ordered[0], ordered[-1], sum(lengths))
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        value = getattr(found, name)
        assert value in ordered and sum(one <= value for one in ordered) >= share * len(ordered)
        assert sum(one < value for one in ordered) < share * len(ordered)


def test_stats_of_conversations(model, tmp_path):
    rows = [chat("What is a wind?", "Air that moves."), chat("What  is a wind?", "Air that moves."), "{torn"]
    rows += [chat("你好，请问今天的天气怎么样？", "今天天气很好。"), {"messages": []}]
    file = write(tmp_path / "a.jsonl", rows)
    (stats,) = measure_sources(DataStatsJob(inputs=[file], model=model, seq_len=60))
    assert (stats.rows, stats.bad_rows, stats.exact_duplicates, stats.near_duplicates) == (3, 2, 1, 0)
    assert stats.kinds == {"conversation": 3} and stats.roles == {"user": 3, "assistant": 3}
    said = [
        "What is a wind?Air that moves.",
        "What  is a wind?Air that moves.",
        "你好，请问今天的天气怎么样？今天天气很好。",
    ]
    assert stats.characters == LengthSummary.from_lengths([len(text) for text in said])
    assert stats.num_bytes == sum(len(text.encode()) for text in said) and stats.longest.endswith("a.jsonl: line 2")
    assert stats.tokens is not None and stats.num_learned is not None
    assert stats.num_learned < stats.tokens.total and stats.num_too_long == 1
    if importlib.util.find_spec("py3langid"):
        assert stats.languages == {"en": pytest.approx(2 / 3), "zh": pytest.approx(1 / 3)}
    else:
        assert stats.languages is None


def test_a_row_that_the_template_cannot_render_is_bad(model, tmp_path):
    rows = [chat("a", "b"), {"messages": [{"role": "user", "content": "nobody answers"}]}]
    (stats,) = measure_sources(DataStatsJob(inputs=[write(tmp_path / "a.jsonl", rows)], model=model))
    assert stats.bad_rows == 1 and "line 2" in stats.bad_row_examples[0]


def test_stats_of_pairs_texts_and_several_sources(model, tmp_path, capsys):
    pair = {"prompt": "Q", "chosen": "good", "rejected": "bad"}
    pairs = write(tmp_path / "p.jsonl", [pair] * 2)
    (tmp_path / "t.txt").write_text("some text", encoding="utf-8")
    with gzip.open(tmp_path / "z.jsonl.gz", "wt", encoding="utf-8") as packed:
        packed.write(json.dumps({"text": "some text"}) + "\n")
    job = DataStatsJob(
        inputs=[pairs, str(tmp_path / "t.txt"), str(tmp_path / "z.jsonl.gz"), "task:arithmetic#5"], model=model
    )
    stats = measure_sources(job)
    assert [one.kinds for one in stats] == [{"pair": 2}, {"text": 1}, {"text": 1}, {"conversation": 5}]
    assert [one.formats for one in stats[:3]] == [{"preference pairs": 2}, {}, {"plain text": 1}]
    assert [one.exact_duplicates for one in stats[:3]] == [1, 0, 1]  # also of an earlier source
    assert stats[1].tokens is not None and stats[1].tokens.total == 9
    assert run(job) == 0
    shown = capsys.readouterr().out
    assert "2 pairs" in shown and "1 text," in shown and "tokens" in shown


def test_stats_as_json(tmp_path, capsys):
    assert run(DataStatsJob(inputs=[write(tmp_path / "a.jsonl", [chat("a", "b")])], json=True, near=False)) == 0
    (tree,) = json.loads(capsys.readouterr().out)["sources"]
    assert (tree["rows"], tree["characters"]["max"], tree["tokens"], tree["near_duplicates"]) == (1, 2, None, None)


def kinds_and_places(result):
    return [(one.kind, one.location.rpartition("/")[2], one.other.rpartition("/")[2]) for one in result.findings]


def test_findings_of_a_file_with_everything_wrong(tmp_path, capsys):
    long = "A long answer, of which most words come again in a row of its own further down in this very file, they do."
    rows = [
        chat("first question", long),
        chat("second question", "short"),
        chat(" second  question", "short"),
        chat("second question", "another answer"),
        chat("a first question", long),
        "{torn",
        chat("empty", ""),
        {"messages": [{"role": "robot", "content": "x"}]},
    ]
    unseen = [
        chat("second question", "an unseen answer"),
        chat("unseen", "unseen"),
        chat("x", "y", tools=[{"name": "t"}]),
    ]
    unseen.append(chat("other", f"{long} And then."))
    files = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", unseen)
    job = DataCheckJob(inputs=[files[0]], data=PictureData(valid=[files[1]]), findings=str(tmp_path / "found.jsonl"))
    result = check_sources(job)
    assert (result.num_training, result.num_held_out) == (5, 4)
    found = kinds_and_places(result)
    assert [kind for kind, *_ in found if kind == "bad row"] == ["bad row"] * 3
    assert [one for one in found if one[0] != "bad row"] == [
        ("contradiction", "a.jsonl: line 4", "a.jsonl: line 2"),
        ("leak", "b.jsonl: line 1", "a.jsonl: line 2"),
        ("leak", "b.jsonl: line 4", "a.jsonl: line 1"),
        ("duplicate", "a.jsonl: line 3", "a.jsonl: line 2"),
        ("near duplicate", "a.jsonl: line 5", "a.jsonl: line 1"),
    ]
    assert data_check.run(job) == 1
    shown = capsys.readouterr().out
    assert "error: 2 rows (50.0%): held out" in shown and "error: 3 rows (25.0%): cannot be used" in shown
    written = [Finding(**json.loads(line)) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert written == result.findings
    data_check.run(DataCheckJob(inputs=[files[0]], data=PictureData(valid=[files[1]]), json=True))
    assert [Finding(**one) for one in json.loads(capsys.readouterr().out)["findings"]] == written


def test_warnings_fail_when_told_to(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [chat(str(number), "the same") for number in range(50)] + [chat("7", "other")])
    data = PictureData(valid_fraction=0.0)
    assert data_check.run(DataCheckJob(inputs=[file], data=data)) == 0
    assert "leaks were not looked for" in capsys.readouterr().out
    assert data_check.run(DataCheckJob(inputs=[file], data=data, strict=True)) == 1


@pytest.mark.parametrize("rows", [30, 1000])
def test_what_a_training_holds_out_by_itself(rows, tmp_path):
    """Every row stands twice: of the held-out share each has its copy in the training rows or among the held out."""
    file = write(
        tmp_path / "a.jsonl", [chat(f"question {number // 2}", f"answer {number // 2}") for number in range(rows)]
    )
    result = check_sources(DataCheckJob(inputs=[file], data=PictureData(valid_fraction=0.1)))
    assert result.num_training + result.num_held_out == rows and 0.05 * rows < result.num_held_out < 0.15 * rows
    places = [(one.location, one.other) for one in result.of_kind("leak")]
    leaks = [tuple(int(place.rpartition(" ")[2]) - 1 for place in pair) for pair in places]
    assert leaks and all(copy == number ^ 1 for number, copy in leaks)
    assert {one.message for one in result.of_kind("leak")} == {"same row"}


def test_pairs_that_share_a_prompt_do_not_contradict(tmp_path):
    rows = [{"prompt": "Q", "chosen": f"good {n}", "rejected": "bad"} for n in range(3)]
    result = check_sources(
        DataCheckJob(inputs=[write(tmp_path / "a.jsonl", rows)], data=PictureData(valid_fraction=0.0))
    )
    assert result.findings == []


@pytest.mark.parametrize("job_class", [DataStatsJob, DataCheckJob])
@pytest.mark.parametrize(("name", "content"), FILES_WITHOUT_A_GOOD_ROW)
def test_files_without_a_good_row_are_named(job_class, name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    measure = measure_sources if job_class is DataStatsJob else check_sources
    with pytest.raises(DataError, match=name):
        measure(job_class(inputs=[str(tmp_path / name)]))


def test_findings_that_cannot_be_written(tmp_path):
    file = write(tmp_path / "a.jsonl", [chat("a", "b")])
    (tmp_path / "folder").mkdir()
    for findings in (tmp_path / "folder", tmp_path / "nowhere" / "found.jsonl"):
        with pytest.raises(Failure, match=findings.name):
            data_check.run(DataCheckJob(inputs=[file], findings=str(findings)))


@pytest.mark.parametrize(
    ("job_class", "settings"),
    [
        (DataStatsJob, {"inputs": []}),
        (DataStatsJob, {"inputs": ["a"], "seq_len": 5}),
        (DataStatsJob, {"inputs": ["a"], "seq_len": 1, "model": "m"}),
        (DataCheckJob, {"inputs": []}),
        (DataCheckJob, {"inputs": ["a"], "similarity": 0.5}),
        (DataCheckJob, {"inputs": ["a"], "similarity": float("nan")}),
    ],
)
def test_wrong_settings(job_class, settings):
    with pytest.raises(ConfigError):
        job_class(**settings)


@pytest.mark.process
@pytest.mark.skipif(not REAL.is_dir(), reason="the shared data is not on this machine")
def test_real_rows():
    file = str(REAL / "sft" / "alpaca_zh_demo.json")
    (stats,) = measure_sources(DataStatsJob(inputs=[file]))
    documents = list(read_documents(parse_source(file), PictureData()))
    assert stats.rows == len(documents) == 1000
    assert stats.languages is None or stats.languages["zh"] > 0.95
    result = check_sources(
        DataCheckJob(inputs=[file], data=PictureData(valid=[str(REAL / "sft" / "alpaca_en_demo.json")]))
    )
    assert result.num_held_out == 999 and not result.of_kind("bad row")
    same = check_sources(DataCheckJob(inputs=[file], near=False, data=PictureData(valid=[file])))
    assert len(same.of_kind("leak")) == 1000


def test_unused_columns_and_bad_answers_are_said(tmp_path, capsys, caplog):
    rows = [{"query": f"q{n}", "response": f"r{n}", "context": "c", "label": n > 2} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data_check.run(DataCheckJob(inputs=[str(tmp_path / "a.jsonl")], data=PictureData(valid_fraction=0.0))) == 0
    assert 'a.jsonl: columns that were not used: "context" (9 rows)' in caplog.text
    assert "note: 3 rows marked as bad answers" in capsys.readouterr().out
    caplog.clear()
    (stats,) = measure_sources(DataStatsJob(inputs=[str(tmp_path / "a.jsonl")]))
    assert stats.unused == {"context": 9} and '"context" (9 rows)' in caplog.text
