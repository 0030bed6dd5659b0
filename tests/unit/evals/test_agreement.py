"""The same pairs through lm-evaluation-harness, where it is installed: the same log-probabilities within rounding.

`test_tasks.py` holds the same figures against their definition, everywhere.
"""

from __future__ import annotations

import pytest

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.evals.local_model import LocalModel
from anabatic.evals.tasks.item_encoding import encode_items
from anabatic.evals.tasks.items import ContextPair, EvalItem
from anabatic.models.pretrained import load_model

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
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    local = LocalModel(
        load_model(folder, device.torch_device, device.dtype), tokenizers.load_tokenizer(folder), device, 400, 2
    )
    texts = encode_items(
        local.tokenizer, [EvalItem(at, "", [ContextPair(*pair)]) for at, pair in enumerate(PAIRS)], local.max_len
    ).texts
    found = {number: one for part in local.score_texts(texts, "scoring") for number, one in part.items()}
    theirs = harness.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, max_length=local.max_len)
    expected = theirs.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS], disable_tqdm=True)
    for number, (logprob, greedy) in enumerate(expected):
        assert found[number].logprob == pytest.approx(logprob, rel=1e-5), PAIRS[number]
        assert found[number].is_greedy == greedy
