"""The same pairs through lm-evaluation-harness, where it is installed: the same log-probabilities within rounding.

`test_tasks.py` holds the same figures against their definition, everywhere.
"""

from __future__ import annotations

import pytest

from anabatic.config.shared import Device as DeviceConfig
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import pick
from anabatic.evals.encode import encode
from anabatic.evals.items import Item, Pair
from anabatic.evals.local import Local
from anabatic.models.hf import load_model

PAIRS = [
    ("The capital of Norway is", " Oslo"),
    ("The capital of Norway is", " Rome"),
    ("The capital of Norway is ", "Oslo"),  # the blank goes over to the continuation
    ("", "a beginning of nothing"),
    ("Why ünïcode?", " därum"),
    ("then " * 80, "and on"),  # longer than the context: cut on the left
    ("x", " " + "y z " * 6),
]


@pytest.mark.filterwarnings("ignore")
def test_the_same_log_probabilities(run_folder):
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    folder = run_folder / "final_model"
    device = pick(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    local = Local(load_model(folder, device.torch, device.dtype), tokenizers.load(folder), device, 400, 2)
    texts = encode(local.tokenizer, [Item(at, "", [Pair(*pair)]) for at, pair in enumerate(PAIRS)], local.max_len).texts
    found = {number: one for part in local.score(texts, "scoring") for number, one in part.items()}
    theirs = harness.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, max_length=local.max_len)
    expected = theirs.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS], disable_tqdm=True)
    for number, (logprob, greedy) in enumerate(expected):
        assert found[number].logprob == pytest.approx(logprob, rel=1e-5), PAIRS[number]
        assert found[number].greedy == greedy
