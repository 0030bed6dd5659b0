"""`/v1/classify` with a reward model: the numbers of the model itself, whole conversations, and what is refused."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.device.device import select_device
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.models import reward_head
from anabatic_testing.random_models import build_random_model
from unit.infer.server.running import catalogue_of, serving

ASKED = {"role": "user", "content": "2 and 2?"}
TALKS = [[ASKED, {"role": "assistant", "content": said}] for said in ("4", "five, or perhaps six", "")]


@pytest.fixture(scope="module")
def judging(engine_parts, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    model = build_random_model(len(tokenizer))
    reward_head.attach_score_head(model)
    model.get_submodule("score").to_empty(device=torch.device("cpu"))
    reward_head.init_score_head(model, 3)
    reward_head.save_reward_model(model, folder, tokenizer)
    scorer = RewardScorer(folder, select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1)))
    catalogue = catalogue_of(engine_parts)
    catalogue.classifiers["judge"] = scorer
    with serving(catalogue) as running:
        yield running, scorer


def test_one_conversation_and_several(judging):
    server, scorer = judging
    expected = [scorer.score_conversations([scorer.encode_conversation(talk)])[0] for talk in TALKS]
    told = server.post("/v1/classify", {"model": "judge", "messages": TALKS}).json()["data"]
    assert [row["index"] for row in told] == [0, 1, 2]
    assert [row["score"] for row in told] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    (alone,) = server.post("/v1/classify", {"messages": TALKS[1]}).json()["data"]
    assert alone["score"] == pytest.approx(expected[1], rel=1e-5)
    with server.client() as client:
        assert "judge" in [row["id"] for row in client.get("/v1/models").json()["data"]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "judge", "input": "DT_NONE"}, 400, "judge is a reward model: give messages"),
        ({"input": "DT_NONE"}, 404, "no model of this kind is served"),
        ({"model": "one", "messages": TALKS[0]}, 404, "there is no model 'one'"),
        ({"model": "judge"}, 400, "give either input or messages"),
        ({"model": "judge", "messages": []}, 400, "messages"),
        ({"model": "judge", "messages": [TALKS[0], []]}, 400, "messages"),
        ({"model": "judge", "messages": [[{"role": "user", "content": "far " * 90}]]}, 400, "the reward model reads"),
        ({"model": "judge", "messages": [TALKS[0][:1]] * 2049}, 400, "2049 inputs; at most 2048"),
    ],
)
def test_what_is_refused(judging, body, status, message):
    answer = judging[0].post("/v1/classify", body)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
