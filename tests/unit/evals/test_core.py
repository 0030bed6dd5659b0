"""The CORE bundle: prompts, examples, scored tokens, centred score, against the evaluation written out slowly."""

from __future__ import annotations

import json
import random

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.evals import result_tables
from anabatic.evals.answer_cache import AnswerCache
from anabatic.evals.local_model import LocalModel
from anabatic.evals.prefix_trees import ScoredText
from anabatic.evals.task_runner import EvalOptions, prepare_task, run_task
from anabatic.evals.tasks import registry
from anabatic.models.pretrained import load_model
from unit.evals.plain import slow

CORE_YAML = """icl_tasks:
- label: warm
  dataset_uri: a/warm.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- label: names
  dataset_uri: a/names.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: last
  dataset_uri: a/last.jsonl
  num_fewshot: [1]
  icl_task_type: language_modeling
"""
CSV = "Eval Task,Task Category,Random baseline\nwarm,x,50\nnames,x,50.0\nlast,x,0\n"


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "eval_bundle"
    (folder / "eval_data" / "a").mkdir(parents=True)
    (folder / "core.yaml").write_text(CORE_YAML)
    (folder / "eval_meta_data.csv").write_text(CSV)
    rows = {
        "warm": [{"query": f"Is {n} warm?", "choices": ["yes it is", "yes it can"], "gold": n % 2} for n in range(5)],
        "names": [
            {"context_options": [f"Ann {n} met", f"Eve met {n}"], "continuation": "her friend there", "gold": 0}
            for n in range(3)
        ],
        "last": [{"context": f"one two three {n}  ", "continuation": "four"} for n in range(4)],
    }
    for name, made in rows.items():
        (folder / "eval_data" / "a" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return tmp_path, rows


def mean_nll(model, ids, scored):
    return -slow(model, ScoredText(ids, scored))[0] / scored


def test_as_written_out_slowly(bundle, run_folder):
    folder, rows = bundle
    model = load_model(run_folder / "final_model", torch.device("cpu"))
    tokenizer = tokenizers.load_tokenizer(run_folder / "final_model")
    local = LocalModel(model, tokenizer, select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1)), 400, 2)
    plan = registry.plan_tasks(["core"], folder)
    found = {
        one.task.name: run_task(
            prepare_task(one, EvalOptions(dataset_folder=folder)),
            local,
            EvalOptions(dataset_folder=folder),
            AnswerCache(None),
        )
        for one in plan.tasks
    }
    first = tokenizer.eos_token_id

    def ids(text):
        return [first, *tokenizer.encode(text, add_special_tokens=False)]

    for name, made in rows.items():
        data = list(made)
        random.Random(1337).shuffle(data)
        for idx, (item, record) in enumerate(zip(data, found[name].records, strict=True)):
            shots = {"warm": 2, "names": 0, "last": 1}[name]
            others = [n for n in range(len(data)) if n != idx]
            chosen = [data[n] for n in random.Random(1234 + idx).sample(others, shots)]
            if name == "last":
                before = "".join(f"{one['context'].strip()} {one['continuation']}\n\n" for one in chosen)
                without, whole = (
                    ids((before + item["context"].strip() + " ").strip()),
                    ids(before + item["context"].strip() + " " + item["continuation"]),
                )
                logprob, greedy = slow(model, ScoredText(whole, len(whole) - len(without)))
                assert record["logprobs"][0] == pytest.approx(logprob, rel=1e-5)
                assert record["right"]["acc"] == greedy
                continue
            if name == "warm":
                before = "".join(f"{one['query']}\nAnswer: {one['choices'][one['gold']]}\n\n" for one in chosen)
                texts = [ids(f"{before}{item['query']}\nAnswer: {choice}") for choice in item["choices"]]
                same = next(at for at in range(99) if texts[0][at] != texts[1][at])
                losses = [mean_nll(model, text, len(text) - same) for text in texts]
            else:
                texts = [ids(f"{option} {item['continuation']}") for option in item["context_options"]]
                same = next(at for at in range(99) if texts[0][-1 - at] != texts[1][-1 - at])
                losses = [mean_nll(model, text, same) for text in texts]
            means = [-a / b for a, b in zip(record["logprobs"], record["tokens"], strict=True)]
            assert means == pytest.approx(losses, rel=1e-5)
            assert record["picks"]["acc_tokens"] == losses.index(min(losses))
    (total,) = result_tables.compute_totals(plan.groups, list(found.values()))
    values = [found[name].main_estimate.value for name in rows]
    centred = [(value - chance) / (1 - chance) for value, chance in zip(values, (0.5, 0.5, 0.0), strict=True)]
    assert total.estimate.value == pytest.approx(sum(centred) / 3)
    assert total.estimate.low < total.estimate.value < total.estimate.high


def test_fewer_items_than_examples_are_refused(bundle):
    folder, _ = bundle
    path = folder / "eval_bundle" / "core.yaml"
    path.write_text(CORE_YAML.replace("[2]", "[25]"))
    with pytest.raises(DataError, match="warm shows 25 examples before a question, and has 4 rows"):
        prepare_task(registry.plan_tasks(["core"], folder).tasks[0], EvalOptions(dataset_folder=folder))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("icl_tasks", "tasks", "no list icl_tasks"),
        ("  dataset_uri: a/names.jsonl\n", "", r"core\.yaml:7: the task has no 'dataset_uri'"),
        ("schema", "shema", "names is of the kind shema"),
        ("label: last", "label: lost", "does not know lost"),
    ],
)
def test_a_broken_bundle(bundle, old, new, message):
    folder, _ = bundle
    (folder / "eval_bundle" / "core.yaml").write_text(CORE_YAML.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        registry.plan_tasks(["core"], folder)


def test_no_bundle_and_a_broken_table(bundle, tmp_path):
    folder, _ = bundle
    with pytest.raises(ConfigError, match=r"holds no core\.yaml"):
        registry.plan_tasks(["core"], tmp_path / "eval_bundle" / "eval_data")
    (folder / "eval_bundle" / "eval_meta_data.csv").write_text("Eval Task,Random\nwarm,50\n")
    with pytest.raises(DataError, match="needs the columns Eval Task and Random baseline"):
        registry.plan_tasks(["core"], folder)
