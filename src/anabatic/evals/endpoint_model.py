"""A served model as somebody who is asked, over OpenAI's completions (https://platform.openai.com/docs/api-reference).

Prompts are sent as tokens, made with the model's own tokenizer from its folder. Likelihoods need an endpoint that
echoes a prompt with its log-probabilities (vLLM does; many others do not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from anabatic.config.chat import Sampling
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.progress import ProgressBar
from anabatic.evals.answer_cache import EvalPrompt
from anabatic.evals.likelihood import Likelihood
from anabatic.evals.prefix_trees import ScoredText
from anabatic.infer.remote.json_client import JsonClient, RequestFailure

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader

T = TypeVar("T")
R = TypeVar("R")


class EndpointModel:
    """Asks a served model.

    Args:
        url: with or without `/v1` at its end.
        tokenizer: of the model that is served.
        max_len: tokens it reads at most.
        at_once: requests under way at a time.

    Attributes:
        pictures: None: it is shown none, for prompts are sent as tokens.

    Raises:
        ConfigError: the endpoint does not answer, or not as one.
    """

    def __init__(self, url: str, tokenizer: Any, max_len: int, at_once: int) -> None:
        self._client = JsonClient(url.rstrip("/").removesuffix("/v1"))
        self._url = self._client.url
        self.pictures: PictureReader | None = None
        self.tokenizer, self.max_len, self._max_concurrent = tokenizer, max_len, at_once
        try:
            self.model_name = str(self._client.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{url} lists no model under /v1/models", "give the address of a served model") from error

    def score_texts(self, texts: Sequence[ScoredText], what: str) -> Iterator[dict[int, Likelihood]]:
        """Yield likelihoods by number of the text.

        Raises:
            ConfigError: the endpoint returns no log-probabilities of a prompt.
            Failure: it does not answer.
        """
        yield from self._map_requests(self._request_likelihood, texts, what)

    def generate_replies(
        self, prompts: Sequence[EvalPrompt], sampling: Sampling, what: str
    ) -> Iterator[dict[int, str]]:
        """Yield replies by number of the prompt.

        Raises:
            Failure: the endpoint does not answer.
        """
        yield from self._map_requests(lambda prompt: self._request_reply(prompt.ids, sampling), prompts, what)

    def _map_requests(self, call: Callable[[T], R], requests: Sequence[T], what: str) -> Iterator[dict[int, R]]:
        with ThreadPoolExecutor(self._max_concurrent) as pool, ProgressBar(what, len(requests)) as bar:
            for first in range(0, len(requests), self._max_concurrent):
                found = list(pool.map(call, requests[first : first + self._max_concurrent]))
                bar.update(first + len(found))
                yield dict(enumerate(found, start=first))

    def _request_reply(self, prompt: list[int], sampling: Sampling) -> str:
        parameters = {"prompt": prompt, "max_tokens": sampling.max_new_tokens, "temperature": 0}
        completion = self._post_completion({**parameters, **({"stop": sampling.stop} if sampling.stop else {})})
        if not isinstance(completion.get("text"), str):
            raise Failure(f"{self._url} answers without a text: {str(completion)[:200]}", "is it an endpoint?")
        return str(completion["text"])

    def _request_likelihood(self, text: ScoredText) -> Likelihood:
        # One new token, which is left out: not every server takes 0.
        parameters = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        try:
            told = (
                self._post_completion({"prompt": np.asarray(text.tokens).tolist(), **parameters}).get("logprobs") or {}
            )
        except RequestFailure as error:
            if error.status in (400, 404, 422):
                raise self._no_logprobs_error(error.said) from error
            raise
        size = len(text.tokens)
        places = slice(size - text.num_scored, size)
        try:
            logprobs = [float(one) for one in told["token_logprobs"][places]]
            tops = [max(one.values()) for one in told["top_logprobs"][places]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._no_logprobs_error("the answer has none") from error
        if not len(logprobs) == len(tops) == text.num_scored:
            raise self._no_logprobs_error("the answer has fewer than the prompt has tokens")
        greedy = all(one >= top for one, top in zip(logprobs, tops, strict=True))
        return Likelihood(sum(logprobs), greedy, text.num_scored)

    def _no_logprobs_error(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._url} returns no log-probabilities of a prompt (`echo` with `logprobs` of /v1/completions): {why}",
            "ask it generative tasks only, or load the model here",
        )

    def _post_completion(self, asked: dict[str, Any]) -> dict[str, Any]:
        told = self._client.post("/v1/completions", {"model": self.model_name, **asked})
        try:
            found: dict[str, Any] = told["choices"][0]
            return found
        except (KeyError, IndexError, TypeError) as error:
            raise Failure(f"{self._url} answers without choices: {str(told)[:200]}", "is it an endpoint?") from error
