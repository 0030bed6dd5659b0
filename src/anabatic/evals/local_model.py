"""A loaded model as somebody who is asked: likelihoods by packed passes, replies by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from anabatic.config.chat import Sampling
from anabatic.core.errors import Failure
from anabatic.core.progress import ProgressBar
from anabatic.device.device import Device
from anabatic.evals.answer_cache import EvalPrompt
from anabatic.evals.likelihood import Likelihood, compute_likelihoods
from anabatic.evals.prefix_trees import ScoredText
from anabatic.infer.engine import Engine
from anabatic.parallel.mesh import SINGLE_RANK, RankGroup

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader
    from anabatic.models.vision.prompt_pictures import PromptPictures


class LocalModel:
    """Asks a model on this machine.

    Args:
        group: processes that are asked the same; this one answers its share.

    Attributes:
        max_len: tokens it reads at most.
        pictures: reads those of questions; None: the model sees none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        device: Device,
        batch_tokens: int,
        batch_size: int,
        group: RankGroup = SINGLE_RANK,
        pictures: PictureReader | None = None,
    ) -> None:
        self.pictures = pictures
        self._group = group
        self._model, self._device, self.tokenizer = model, device, tokenizer
        self._batch_tokens, self._batch_size = batch_tokens, batch_size
        self.max_len: int = model.config.get_text_config().max_position_embeddings

    def score_texts(self, texts: Sequence[ScoredText], what: str) -> Iterator[dict[int, Likelihood]]:
        """Yield likelihoods by number of the text, a batch at a time.

        Raises:
            Failure: they are not numbers.
        """
        for found in compute_likelihoods(self._model, self._device, texts, self._batch_tokens, what, group=self._group):
            if any(one.logprob != one.logprob for one in found.values()):
                raise Failure(
                    "the model's log-probabilities are not numbers (NaN)",
                    "the weights are broken, or device.dtype is too narrow for them: try --device.dtype fp32",
                )
            yield found

    def generate_replies(
        self, prompts: Sequence[EvalPrompt], sampling: Sampling, what: str
    ) -> Iterator[dict[int, str]]:
        """Yield replies by number of the prompt, as they are finished; each prompt leaves room for one.

        Raises:
            Failure: the model's logits are not numbers.
        """
        mine = range(self._group.rank, len(prompts), self._group.size)
        if not mine:
            return
        longest = max(len(prompts[number].ids) for number in mine)
        engine = Engine(
            self._model,
            self.tokenizer,
            max_batch=self._batch_size,
            max_len=min(longest + sampling.max_new_tokens, self.max_len),
        )
        requests = {
            engine.request(prompts[number].ids, sampling, pictures=self._read_pictures(prompts[number])): number
            for number in mine
        }
        engine.submit(requests)
        done = 0
        try:
            with ProgressBar(what, len(requests)) as bar:
                while done < len(requests):
                    finished = engine.step()
                    done += len(finished)
                    bar.update(done)
                    if finished:
                        yield {requests[one]: engine.get_completion(one).text for one in finished}
        finally:
            engine.cancel_requests(requests)

    def _read_pictures(self, prompt: EvalPrompt) -> PromptPictures | None:
        return None if self.pictures is None else self.pictures.read(*prompt)
