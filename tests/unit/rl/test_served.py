"""Answers of servers: those of the engine of this process, new weights with proof, and servers that fail."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from anabatic.config.chat import Sampling
from anabatic.config.rl import RlJob, RolloutSettings
from anabatic.core.errors import ConfigError, Failure
from anabatic.infer.engine import Engine
from anabatic.infer.remote import served_engine
from anabatic.infer.remote.inference_servers import SERVERS, InterruptedAnswer, VllmServer
from anabatic.infer.remote.json_client import API_KEY_VARIABLE, RequestFailure
from anabatic.infer.remote.served_engine import ServedEngine, ServerPool
from anabatic.models.pretrained import load_model, save_model
from anabatic.parallel.world import World
from anabatic.recipes.training.rl import run
from anabatic.rl import weight_sync
from anabatic_testing.random_models import build_random_model
from suite import fake_servers
from suite.fake_servers import FakeServer, FakeSglang, FakeVllm, running
from unit.infer.server.running import KEY, catalogue_of, serving
from unit.infer.test_adapters import adapted
from unit.rl.conftest import Make, make_in

PROMPT = [40, 41, 42]
GREEDY = Sampling(temperature=0.0, top_k=None, max_new_tokens=6, seed=1)
KINDS: dict[str, Callable[[Path], FakeServer]] = {
    "vllm 0.23": lambda folder: FakeVllm(folder, "0.23"),
    "vllm 0.33": FakeVllm,
    "sglang": FakeSglang,
}
ALL = [*KINDS, "anabatic"]


@contextmanager
def started(kind: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FakeServer | None]]:
    """Yield the address of a server of a kind, and the fake; `anabatic serve` is none."""
    if kind in KINDS:
        fake = KINDS[kind](model)
        with running(fake) as url:
            yield url, fake
        return
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    loaded, tokenizer = load_model(model, torch.device("cpu")), AutoTokenizer.from_pretrained(model)
    parts = {"policy": (Engine(loaded, tokenizer, max_batch=8, max_len=64), loaded)}
    with serving(catalogue_of(parts), keys=[KEY], weights_folder=Path("/")) as here:
        yield here.url, None


def served(url: str, kind: str, **more: Any) -> RolloutSettings:
    return RolloutSettings(engine=kind.split()[0], url=[url], **more)


def rows(job: RlJob, kind: str = "train") -> list[dict[str, Any]]:
    lines = (Path(job.out) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("kind", ALL)
def test_a_server_answers_as_the_engine(chat_model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeVllm(chat_model).engine
    drawn = Sampling(temperature=1.0, top_k=None, max_new_tokens=6, seed=5)
    with started(kind, chat_model, monkeypatch) as (url, _):
        server = SERVERS[kind.split()[0]](url)
        server.require_ready()
        for sampling in (GREEDY, drawn):
            for stops in ([], own.generate([PROMPT], sampling)[0].ids[1:2]):
                [done] = own.generate([PROMPT], sampling, {*own.stop_ids, *stops})
                answer = server.generate(PROMPT, sampling, stops)
                assert answer.ids == done.ids and answer.finish_reason == done.finish_reason
                assert answer.logprobs == pytest.approx(done.logprobs, abs=1e-5)


SHORT: dict[str, Any] = {"steps": 3, "python": False, "mask_truncated": False}


@pytest.fixture(scope="module")
def own_runs(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RlJob]:
    """Trainings by the engine of the process, each once: tuner -> its settings."""
    make = make_in(chat_model, tmp_path_factory.mktemp("own"))

    @functools.cache
    def train(tuner: str) -> RlJob:
        job = make(name=tuner, tuner=tuner, **SHORT)
        assert run(job) == 0
        return job

    return train


@pytest.mark.process
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_training_equals_that_of_the_engine(
    make: Make,
    own_runs: Callable[[str], RlJob],
    chat_model: Path,
    kind: str,
    tuner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server draws with the same seeds from the same weights, which it gets before every round."""
    own = own_runs(tuner)
    with started(kind, chat_model, monkeypatch) as (url, fake):
        job = make(name="served", rollout=served(url, kind), tuner=tuner, **SHORT)
        assert run(job) == 0
    keys = ("loss", "reward", "answer_tokens", "grad_norm")
    for ours, theirs in zip(rows(own), rows(job), strict=True):
        if kind != "sglang":  # whose seeds have 31 bits
            assert [theirs[key] for key in keys] == pytest.approx([ours[key] for key in keys], rel=1e-4, abs=1e-6)
        assert theirs["sync_logprob_diff"] < 1e-4 and theirs["logprob_diff"] < 1e-4 and theirs["sync_s"] > 0
    assert rows(job, "eval")[0]["valid_reward"] == rows(own, "eval")[0]["valid_reward"]
    if fake is not None:
        assert [Path(folder).name for folder in fake.loaded] == [f"policy-{step}" for step in range(4)]
    assert [folder.name for folder in (Path(job.out) / "rollout").iterdir()] == ["policy-3"]


@pytest.mark.process
def test_a_server_with_the_least_of_routes(make: Make, own_runs: Callable[[str], RlJob], chat_model: Path) -> None:
    """Without a list of models and without adapters, it gets whole weights with the adapter merged."""
    own = own_runs("lora")
    fake = FakeVllm(chat_model, lora=False, listed=False)
    with running(fake) as url:
        job = make(name="served", rollout=served(url, "vllm"), tuner="lora", **SHORT)
        assert run(job) == 0
    assert [row["loss"] for row in rows(job)] == pytest.approx([row["loss"] for row in rows(own)], rel=1e-4, abs=1e-6)
    assert [Path(folder).name for folder in fake.loaded] == [f"policy-{step}-merged" for step in range(4)]
    assert fake.asked["/v1/load_lora_adapter"] == 1
    assert sorted(one.name for one in (Path(job.out) / "rollout").iterdir()) == ["policy-3", "policy-3-merged"]


@pytest.mark.process
def test_a_server_that_the_training_starts(make: Make, chat_model: Path, tmp_path: Path, free_port: int) -> None:
    """It dies in its first answer, is started again with the current weights, and ends with the training."""
    program = Path(fake_servers.__file__)
    words = [sys.executable, str(program), str(chat_model), str(free_port), str(tmp_path / "died")]
    url = f"http://127.0.0.1:{free_port}"
    job = make(python=False, steps=2, mask_truncated=False, rollout=served(url, "vllm", command=shlex.join(words)))
    assert run(job) == 0 and (tmp_path / "died").exists() and len(rows(job)) == 2
    assert (Path(job.out) / "rollout-server.log").read_text().count(url) == 2
    with pytest.raises(RequestFailure, match="does not answer"):
        VllmServer(url).require_ready()


@pytest.mark.process
def test_commands_that_start_no_server(make: Make, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    with pytest.raises(ConfigError, match="rollout.command cannot be started"):
        run(make(rollout=served(url, "vllm", command="/no/such/program")))
    with pytest.raises(Failure, match="has ended 5 times, with exit code 1"):
        run(make(name="false", python=False, rollout=served(url, "vllm", command="false")))


@pytest.mark.process
@pytest.mark.parametrize("times", [1, 99])
def test_weights_that_did_not_arrive_are_noticed(make: Make, chat_model: Path, times: int) -> None:
    """Once: they are loaded again. Each time: the training ends before it learns from answers of another model."""
    fake = FakeVllm(chat_model)
    optim = make().optim
    optim.lr = 0.05
    with running(fake) as url:
        assert run(make(name="first", steps=1, optim=optim)) == 0  # a model that differs from the server's
        fake.faults["stale weights"] = times
        model = str(Path(make(name="first").out) / "final_model")
        job = make(name="second", model=model, steps=1, optim=optim, python=False, rollout=served(url, "vllm"))
        if times == 1:
            assert run(job) == 0 and len(fake.loaded) == 3
            return
        with pytest.raises(Failure, match=r"holds another model than the trainer after step 0: mean difference of"):
            run(job)
        assert len(fake.loaded) == 2 and not rows(job)


@pytest.mark.process
def test_log_probabilities_of_another_temperature_are_refused(make: Make, chat_model: Path) -> None:
    """vLLM's are those at temperature 1, unless it is told otherwise."""
    with running(FakeVllm(chat_model)) as url:
        job = make(python=False, rollout=served(url, "vllm", max_logprob_diff=1e-4))
        job.sampling.temperature = 0.5
        with pytest.raises(ConfigError, match="at temperature 1, and answers are drawn at 0.5") as caught:
            run(job)
    assert "--logprobs-mode processed_logprobs" in caught.value.hint


def test_a_server_without_routes_of_development(chat_model: Path, tmp_path: Path) -> None:
    with running(FakeVllm(chat_model, dev=False)) as url:
        server = VllmServer(url)
        server.require_ready()
        with pytest.raises(ConfigError, match="it cannot load new weights") as caught:
            server.load_weights(tmp_path, 1)
    assert "VLLM_SERVER_DEV_MODE=1" in caught.value.hint


def test_a_cache_that_is_in_use_is_emptied_later(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabatic.infer.remote import inference_servers

    monkeypatch.setattr(inference_servers, "_CACHE_WAITS", (0.0, 0.0))
    fake = FakeVllm(chat_model)
    with running(fake) as url:
        server = VllmServer(url)
        fake.faults["held blocks"] = 2
        server.load_weights(chat_model, 1)
        assert fake.asked["/reset_prefix_cache"] == 3 and not fake.is_paused
        fake.faults["held blocks"] = 9
        with pytest.raises(RequestFailure, match="does not empty its prefix cache"):
            server.load_weights(chat_model, 2)
        assert not fake.is_paused


def test_answers_in_another_form(chat_model: Path) -> None:
    fake = FakeVllm(chat_model)
    with running(fake) as url:
        server = VllmServer(url)
        server.require_ready()
        fake.faults["no tokens"] = 1
        with pytest.raises(ConfigError, match="answers with no tokens and 6 log-probabilities"):
            server.generate(PROMPT, GREEDY, [])
        fake.faults["abort"] = 1
        with pytest.raises(InterruptedAnswer, match="by abort"):
            server.generate(PROMPT, GREEDY, [])
        with pytest.raises(RequestFailure, match="answers 404"):
            SERVERS["sglang"](url).require_ready()
    with pytest.raises(RequestFailure, match="does not answer"):
        server.require_ready()


def test_a_lost_server_is_replaced_and_taken_back(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engine, "_RETURN_SECONDS", 0.0)
    monkeypatch.setattr(served_engine, "_POLL_SECONDS", 0.01)
    one, two = FakeVllm(chat_model), FakeVllm(chat_model)
    restored: list[str] = []
    with running(two) as second:
        with running(one) as first:
            pool = ServerPool([VllmServer(first), VllmServer(second)], [])
            pool.restore = lambda server: restored.append(server.url)
            for server in pool.servers:
                server.require_ready()
        engine = ServedEngine(pool, one.tokenizer, 64, 4)
        requests = [engine.request(PROMPT, GREEDY, name="q") for _ in range(6)]
        engine.submit(requests)
        done: list[Any] = []
        while len(done) < 6:
            done += engine.step()
        assert {tuple(engine.get_completion(request).ids) for request in requests}.__len__() == 1
        assert [server.url for server in pool.answering] == [second] and two.asked["/v1/completions"] == 6
        with running(one, int(first.rpartition(":")[2])):
            while not restored:
                pool.generate(PROMPT, GREEDY, lambda: False)
            assert restored == [first] and len(pool.answering) == 2


@pytest.mark.parametrize("kind", ["all weights", "adapter"])
def test_a_restarted_server_proves_its_weights(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is asked again once it has the weights of now, not before, and not as long as it answers as another model."""
    monkeypatch.setattr(served_engine, "_RETURN_SECONDS", 0.0)
    monkeypatch.setattr(served_engine, "_POLL_SECONDS", 0.01)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    trained = tmp_path / "trained"
    adapted(tokenizer, tmp_path / "adapter", 1)
    save_model(build_random_model(len(tokenizer), seed=9), trained, tokenizer)
    saved = trained if kind == "all weights" else tmp_path / "adapter"
    fake = FakeVllm(chat_model)
    with running(fake) as url:
        pool = ServerPool([VllmServer(url)], [])
        sync = weight_sync.WeightSync(
            folder=tmp_path / "rollout",
            pool=pool,
            save=lambda folder: shutil.copytree(saved, folder) and None,
            merge=None if kind == "all weights" else lambda folder, out: None,
            score=lambda rollouts, temperature: [one for rollout in rollouts for one in rollout.logprobs],
            prompts=[PROMPT, PROMPT[:2]],
            temperature=1.0,
            max_diff=0.01,
            world=World(),
        )
        sync.publish(1)
        name, before = pool.servers[0].adapter, pool.generate(PROMPT, GREEDY, lambda: False)
    if kind == "all weights":  # an adapter's name is lost with it, which an answer says
        pool.leave_out(pool.servers[0], "it died")
    again = FakeVllm(chat_model)  # as it starts: with the weights from before
    again.faults["stale weights"] = 2
    with running(again, int(url.rpartition(":")[2])):
        assert pool.generate(PROMPT, GREEDY, lambda: False).ids == before.ids
        assert pool.answering and pool.servers[0].adapter == name
        loads = ["policy-1"] * (3 if kind == "all weights" else 1)
        assert [Path(folder).name for folder in again.loaded] == loads
        if kind == "all weights":
            again.faults["stale weights"] = 10**6
            again._load(chat_model)
            monkeypatch.setattr(served_engine, "_PATIENCE_SECONDS", 0.3)
            pool.leave_out(pool.servers[0], "it died")
            with pytest.raises(Failure, match="answers again, but as another model: log-probabilities of"):
                pool.generate(PROMPT, GREEDY, lambda: False)


@pytest.mark.process
def test_another_base_is_named(make: Make, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose model is not the one that adapters are trained for: the first weight that differs is said."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    save_model(build_random_model(len(tokenizer), seed=9), tmp_path / "other", tokenizer)
    with started("anabatic", tmp_path / "other", monkeypatch) as (url, _):
        job = make(steps=1, tuner="lora", python=False, rollout=served(url, "anabatic"))
        with pytest.raises(
            Failure, match=r"holds another model .* weights are not those of .*model, the first model\."
        ):
            run(job)


@pytest.mark.parametrize("kind", ["anabatic", "sglang"])
def test_answers_of_other_weights_are_noticed(chat_model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is restarted between two questions has the weights of its start, and says so."""
    with started(kind, chat_model, monkeypatch) as (url, _):
        server, other = SERVERS[kind](url), SERVERS[kind](url)
        server.load_weights(chat_model, 1)
        assert server.generate(PROMPT, GREEDY, []).ids
        other.load_weights(chat_model, 1)
        with pytest.raises(RequestFailure, match="answers with other weights than it was given") as caught:
            server.generate(PROMPT, GREEDY, [])
        assert caught.value.is_temporary and other.generate(PROMPT, GREEDY, []).ids


def test_nobody_waits_for_ever(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engine, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(served_engine, "_POLL_SECONDS", 0.01)
    pool = ServerPool([VllmServer("http://127.0.0.1:9")], [])
    pool.leave_out(pool.servers[0], "it died")
    with pytest.raises(Failure, match="no server answers"):
        pool.wait_for_one()
    with pytest.raises(Failure, match="no server answers"):
        pool.generate(PROMPT, GREEDY, lambda: False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "vllm"}, "rollout.url is empty"),
        ({"url": ["http://a:1"]}, "rollout.engine is local and rollout.url names servers"),
        ({"engine": "vllm", "url": ["a:8000"]}, "rollout.url is a:8000"),
        ({"max_logprob_diff": 0.0}, "rollout.max_logprob_diff is 0.0"),
    ],
)
def test_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RolloutSettings(**given)


def test_cut_distributions_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="cuts the answers of a server"):
        sampling = make().sampling
        sampling.top_p = 0.9
        make(rollout=RolloutSettings(engine="vllm", url=["http://a:1"]), sampling=sampling)


def test_probes_are_few() -> None:
    assert weight_sync.PROBES * weight_sync.PROBE_TOKENS <= 64
