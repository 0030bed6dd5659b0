"""New weights for inference servers by a folder that both sides see, and the proof that both hold the same model."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from anabatic.config.chat import Sampling
from anabatic.core import log
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.infer.remote.inference_servers import InferenceServer, MissingRoute
from anabatic.infer.remote.json_client import RequestFailure
from anabatic.infer.remote.served_engine import ServerPool
from anabatic.infer.server.weight_loading import describe_tensor
from anabatic.models.pretrained import resolve_base_folder
from anabatic.models.weights_reader import open_weights
from anabatic.parallel.collectives import barrier, broadcast_text
from anabatic.parallel.world import World
from anabatic.rl.rollout import Rollout

PROBES, PROBE_TOKENS = 4, 16
"""Answers of each server that are scored on both sides after new weights, and tokens of each at most."""
Scorer = Callable[[Sequence[Rollout], float], Sequence[float]]
"""`score(rollouts, temperature)`: the trainer's log-probabilities of the tokens that were chosen, one after the other.
Every rank calls it."""


@dataclass
class WeightSync:
    """Gives servers the weights that are trained, once for each version.

    Attributes:
        folder: where versions are written; a server sees it under the same path.
        save: writes the model, or its adapter; every rank calls it.
        merge: writes an adapter and its base as one model, for servers that take no adapters; None: whole models are
            saved.
        score: the trainer's side of the proof.
        prompts: some to ask.
        temperature: at which answers are drawn.
        max_diff: mean absolute difference of log-probabilities that is rounding.
        version: optimizer steps of the weights that the servers have; -1: none.
        metrics: of the last time.
    """

    folder: Path
    pool: ServerPool
    save: Callable[[Path], None]
    merge: Callable[[Path, Path], None] | None
    score: Scorer
    prompts: Sequence[list[int]]
    temperature: float
    max_diff: float
    world: World
    version: int = -1

    def __post_init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._saved: Path | None = None
        self._proven: list[tuple[Rollout, list[float]]] = []
        self._without_adapters: set[InferenceServer] = set()
        self.pool.restore = self.restore

    def publish(self, version: int) -> None:
        """Give the servers the weights after `version` optimizer steps; every rank calls this.

        Raises:
            ConfigError: a server has not been started so that it can load them, or reports other log-probabilities
                than those of what it draws from.
            Failure: no server could load them, or one holds another model afterwards.
        """
        if version == self.version:
            return
        start, before = time.perf_counter(), self._saved
        folder = self.folder / f"policy-{version}"
        if self.world.is_main_process:
            _remove_version(folder)  # of a run that ended in the middle of it
        barrier(self.world)
        self.save(folder)
        self._saved, self.version, self._proven = folder, version, []
        self._load_everywhere(self.pool.answering)
        diff = self._prove(retry=True)
        if self.world.is_main_process and before is not None:
            _remove_version(before)
        self.metrics = {"sync_s": round(time.perf_counter() - start, 4), "sync_logprob_diff": diff}

    def restore(self, server: InferenceServer) -> None:
        """Give a server the current weights, as it may have been restarted, and have it prove that it has them.

        Only this rank asks: the answers to the questions of the last proof are compared as far as they are the same.
        Before a server has passed that proof, it is still to come, for all of them.

        Raises:
            RequestFailure: it does not answer, or as another model does.
        """
        if self._saved is None:
            return
        is_current = server.adapter.startswith(f"policy-{self.version}-")  # as other ranks know it
        self._load(server, self._saved.resolve(), server.adapter if is_current else "")
        if not self._proven:
            return
        diffs: list[float] = []
        for number, (before, ours) in enumerate(self._proven):
            now = Rollout(**self._ask_probe(server, number))  # type: ignore[arg-type]
            pairs = zip(before.ids[before.start :], now.ids[now.start :], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            diffs += [abs(mine - theirs) for mine, theirs in zip(ours[:same], now.logprobs[:same], strict=True)]
        diff = sum(diffs) / len(diffs) if diffs else float("nan")
        if not diff <= self.max_diff:
            what = f"{server.url} answers again, but as another model: log-probabilities of {len(diffs)} tokens"
            raise RequestFailure(f"{what} differ by {diff:.4f}", "start it with the folder of --model")

    def _load(self, server: InferenceServer, folder: Path, name: str) -> None:
        """Give a server weights; an adapter gets the name, or a new one where it is empty."""
        if self.merge is None:
            server.load_weights(folder, self.version)
            return
        if server not in self._without_adapters:
            try:
                server.load_adapter(folder, name or f"policy-{self.version}-{time.time_ns():x}")
                return
            except (MissingRoute, RequestFailure) as error:
                if isinstance(error, RequestFailure) and error.status != 400:
                    raise
                log.warn(f"{error}; it gets whole weights with the adapter merged, which takes longer")
                self._without_adapters.add(server)
        merged = _merged_folder(folder)
        if not merged.exists():
            self.merge(folder, merged)
        server.load_weights(merged, self.version)

    def _load_everywhere(self, servers: Sequence[InferenceServer]) -> None:
        """Rank 0 has servers load the weights; all ranks learn the names of adapters and versions."""

        def load() -> str:
            assert self._saved is not None
            loaded: dict[str, list[str]] = {}
            for server in servers:
                try:
                    self._load(server, self._saved.resolve(), "")
                    loaded[server.url] = [server.adapter, server.version]
                except RequestFailure as error:
                    if not error.is_temporary:
                        raise
                    self.pool.leave_out(server, str(error))
            return json.dumps(loaded)

        names = json.loads(self._on_main(load))
        for server in servers:
            if server.url in names:
                server.adapter, server.version = names[server.url]
        self._leave_out_others(servers, names)

    def _leave_out_others(self, servers: Sequence[InferenceServer], known: Collection[str]) -> None:
        """Other ranks do not ask a server that rank 0 did not reach: it has the weights from before."""
        for server in servers:
            if server.url not in known:
                self.pool.leave_out(server, "rank 0 did not reach it")

    def _prove(self, retry: bool) -> float:
        """Return the largest mean difference of a server; load once more where it is too large.

        Raises:
            Failure: it is too large again.
        """
        told = json.loads(self._on_main(self._ask_probes))
        self._leave_out_others(self.pool.answering, told)
        worst, differing = 0.0, []
        for url, probes in told.items():
            rollouts = [Rollout(**one) for one in probes]
            diff, ours = self._measure(rollouts, self.temperature)
            worst = max(worst, diff)
            if not diff <= self.max_diff:  # NaN differs, too
                differing.append((url, diff, rollouts))
            else:
                self._proven = _pair_answers(rollouts, ours)
        if not differing:
            return worst
        url, diff, rollouts = differing[0]
        if retry:
            log.warn(f"{url}: log-probabilities differ by {diff:.4f} after new weights; they are loaded once more")
            names = {url for url, *_ in differing}
            self._load_everywhere([one for one in self.pool.answering if one.url in names])
            return self._prove(retry=False)
        what = f"{url} holds another model than the trainer after step {self.version}: mean difference of"
        what += f" log-probabilities {diff:.4f}, at most {self.max_diff:g} (rollout.max_logprob_diff)"
        server = next(one for one in self.pool.servers if one.url == url)
        if self.temperature != 1 and self._measure(rollouts, 1.0)[0] <= self.max_diff:
            raise ConfigError(
                f"{url} reports log-probabilities at temperature 1, and answers are drawn at {self.temperature:g}",
                f"{server.temperature_hint}, or use --sampling.temperature 1",
            )
        what += self._on_main(lambda: self._name_difference(server))
        raise Failure(what, "start the server with the folder of --model, without quantisation, and look at its log")

    def _name_difference(self, server: InferenceServer) -> str:
        """Return which weights are not those of the folder that the server should have; empty: it cannot tell."""
        assert self._saved is not None
        try:
            told = server.list_checksums()
        except RequestFailure as error:
            return f"; {error}"
        if not told:
            return ""
        is_adapter = self.merge is not None and server not in self._without_adapters
        whole = self._saved if self.merge is None else _merged_folder(self._saved)
        folder = resolve_base_folder(self._saved) if is_adapter else whole
        with open_weights(folder) as stored:
            known = [name for name in told if name in stored.names]
            differing = [name for name in known if _describe_like(stored.read_tensor(name), told[name]) != told[name]]
        if differing:
            return f"; {len(differing)} of {len(known)} weights are not those of {folder}, the first {differing[0]}"
        rest = ": the adapter differs" if is_adapter else ""
        return f"; its {len(known)} weights are those of {folder}{rest}"

    def _measure(self, rollouts: Sequence[Rollout], temperature: float) -> tuple[float, list[float]]:
        """Return the mean difference, and the trainer's log-probabilities."""
        ours = list(self.score(rollouts, temperature))
        theirs = torch.tensor([one for rollout in rollouts for one in rollout.logprobs])
        return float((torch.tensor(ours) - theirs).abs().mean()), ours

    def _ask_probes(self) -> str:
        """Return the answers of each server, as JSON."""
        found: dict[str, list[dict[str, object]]] = {}
        while not found:
            self.pool.wait_for_one()
            for server in self.pool.answering:
                try:
                    found[server.url] = [self._ask_probe(server, at) for at in range(min(PROBES, len(self.prompts)))]
                except RequestFailure as error:
                    self.pool.leave_out(server, str(error))
        return json.dumps(found)

    def _ask_probe(self, server: InferenceServer, number: int) -> dict[str, object]:
        prompt = self.prompts[number]
        sampling = Sampling(temperature=self.temperature, top_k=None, max_new_tokens=PROBE_TOKENS, seed=number)
        answer = server.generate(prompt, sampling, self.pool.stop_ids)
        chosen = [1] * len(answer.ids)
        return vars(Rollout(0, number, [*prompt, *answer.ids], len(prompt), chosen, answer.logprobs))

    def _on_main(self, call: Callable[[], str]) -> str:
        """Return on every rank what rank 0 returns, and raise on every rank what it raises."""
        text, fault = "", ""
        error: AnabaticError | None = None
        if self.world.is_main_process:
            try:
                text = call()
            except AnabaticError as found:
                error, fault = found, str(found)
        told = json.loads(broadcast_text(json.dumps([text, fault]), self.world))
        if error is not None:
            raise error
        if told[1]:
            raise Failure(told[1], "rank 0 says more")
        return str(told[0])


def _pair_answers(rollouts: Sequence[Rollout], values: Sequence[float]) -> list[tuple[Rollout, list[float]]]:
    """Return each answer with its own of the values of all their tokens."""
    rest = iter(values)
    return [(rollout, list(itertools.islice(rest, rollout.num_chosen))) for rollout in rollouts]


def _describe_like(value: Tensor, told: str) -> str:
    dtype = getattr(torch, told.partition(":")[0], None)
    return describe_tensor(value, dtype) if isinstance(dtype, torch.dtype) else ""


def _merged_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-merged")


def _remove_version(folder: Path) -> None:
    for one in (folder, _merged_folder(folder)):
        if one.exists():
            shutil.rmtree(one)
