"""One model in several processes: the first of them asks, each answers its share, and all answers reach the first.

The others know nothing of tasks. They receive what is asked and how, so that rows are read, replies are judged and
files are written in one place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.config.chat import Sampling
from anabatic.core.json_reader import JsonlWriter
from anabatic.evals.answer_cache import EvalPrompt, make_reply_key, make_text_key, rank_cache_path
from anabatic.evals.likelihood import Likelihood
from anabatic.evals.local_model import LocalModel
from anabatic.evals.prefix_trees import ScoredText
from anabatic.parallel.collectives import all_gather_text, broadcast_text
from anabatic.parallel.world import World


class DistributedModel:
    """Asks a model that every process of `world` holds; rank 0 calls it, the others `serve_requests`.

    Likelihoods are dealt by the batch, and batches are those of one process: they are equal to the bit. Replies are
    dealt one by one.

    Args:
        local: this process's model, which knows its share.

    Attributes:
        max_len: tokens it reads at most.
    """

    def __init__(self, local: LocalModel, world: World) -> None:
        self._local, self._world = local, world
        self.tokenizer, self.max_len, self.pictures = local.tokenizer, local.max_len, local.pictures

    def score_texts(self, texts: Sequence[ScoredText], what: str) -> Iterator[dict[int, Likelihood]]:
        """Yield likelihoods by number of the text, of this process's share as they come, then all others'.

        Raises:
            Failure: they are not numbers.
        """
        self._broadcast_request(
            what=what, texts=lambda: [(np.asarray(text.tokens).tolist(), text.num_scored) for text in texts]
        )
        yield from self._local.score_texts(texts, what)
        for answers in self._gather_answers({}):
            yield {int(number): Likelihood(*one) for number, one in answers.items()}

    def generate_replies(
        self, prompts: Sequence[EvalPrompt], sampling: Sampling, what: str
    ) -> Iterator[dict[int, str]]:
        """Yield replies by number of the prompt, of this process's share as they are finished, then all others'.

        Raises:
            Failure: the model's logits are not numbers.
        """
        self._broadcast_request(what=what, prompts=lambda: prompts, sampling=lambda: asdict(sampling))
        yield from self._local.generate_replies(prompts, sampling, what)
        for answers in self._gather_answers({}):
            yield {int(number): one for number, one in answers.items()}

    def close(self) -> None:
        """Let the other processes go."""
        self._broadcast_request()

    def serve_requests(self, store: Path) -> None:
        """Answer what rank 0 asks until it closes.

        What is found lies beside `store` until rank 0 has it: a run that is killed asks it no more.

        Raises:
            Failure: the model is broken, or the folder cannot be written.
        """
        kept = rank_cache_path(store, self._world.rank)
        while message := json.loads(broadcast_text("", self._world)):
            kept.unlink(missing_ok=True)  # rank 0 asks anew: it has kept all that it asked before
            writer = JsonlWriter(kept)
            rank_answers: dict[int, Any] = {}
            for names, found in self._iter_answers(message):
                writer.write({names[number]: one for number, one in found.items()})
                rank_answers |= found
            writer.close()
            self._gather_answers(rank_answers)
        kept.unlink(missing_ok=True)

    def _iter_answers(self, message: dict[str, Any]) -> Iterator[tuple[list[str], dict[int, Any]]]:
        """Yield the names of all that is asked, and what was found of it, batch by batch."""
        if "texts" in message:
            texts = [ScoredText(np.array(tokens, dtype=np.int64), scored) for tokens, scored in message["texts"]]
            names = [make_text_key(text) for text in texts]
            for scored in self._local.score_texts(texts, message["what"]):
                yield names, {number: list(one) for number, one in scored.items()}
            return
        sampling = Sampling(**message["sampling"])
        prompts = [EvalPrompt(ids, pictures) for ids, pictures in message["prompts"]]
        names = [make_reply_key(prompt, sampling) for prompt in prompts]
        for replies in self._local.generate_replies(prompts, sampling, message["what"]):
            yield names, dict(replies)

    def _broadcast_request(self, **message: Any) -> None:
        if self._world.size > 1:
            resolved = {name: value() if callable(value) else value for name, value in message.items()}
            broadcast_text(json.dumps(resolved), self._world)

    def _gather_answers(self, rank_answers: dict[int, Any]) -> list[dict[str, Any]]:
        """Return what the other ranks found."""
        return [json.loads(text) for text in all_gather_text(json.dumps(rank_answers), self._world)[1:]]
