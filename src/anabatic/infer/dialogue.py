"""A conversation that fits into the engine: turns in, prompt tokens out, the oldest turns dropped first."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anabatic.core.errors import DataError, UserError
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.row_pictures import TAG
from anabatic.infer.engine import Engine, Request
from anabatic.infer.sampling import Sampling

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader
    from anabatic.models.vision.prompt_pictures import PromptPictures

ChatTurn = dict[str, Any]
"""Role and content, and `images` where the content has tags of pictures."""


@dataclass
class Dialogue:
    """A conversation so far, and the settings of the next answer.

    A model without a chat template has no turns: every line is continued alone.

    Attributes:
        engine: writes the answers.
        sampling: how; with a seed, every answer has its own seed that follows from it.
        system: system message, or None.
        messages: the turns, without the system message.
        num_dropped: messages that no longer fit, dropped for the latest answer.
        request: the latest answer's request.
        pictures: reads pictures; None: the model sees none.
        attached: pictures of the next message.
    """

    engine: Engine
    sampling: Sampling
    system: str | None = None
    messages: list[ChatTurn] = field(default_factory=list)
    num_dropped: int = 0
    request: Request | None = None
    num_answers: int = 0
    pictures: PictureReader | None = None
    attached: list[str] = field(default_factory=list)

    @property
    def has_chat_template(self) -> bool:
        """True when the tokenizer has a chat template."""
        return bool(self.engine.tokenizer.chat_template)

    def get_transcript(self) -> list[ChatTurn]:
        """The system message and all turns that are still remembered."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.messages]

    def clear_messages(self) -> None:
        """Start over; the system message stays."""
        self.messages.clear()
        self.attached.clear()

    def attach_picture(self, source: str) -> None:
        """Show a picture, a path or a data URI, with the next message.

        Raises:
            DataError: the model sees no pictures, or this one cannot be read.
        """
        if self.pictures is None:
            raise DataError("the model sees no pictures", "use a model that does, such as Qwen3-VL")
        load_picture(source)
        self.attached.append(source)

    def regenerate_answer(self) -> Generator[str, None, None]:
        """Return another answer to the last message; it takes the place of the one before, as `answer_message` does it.

        Raises:
            DataError: there is no message, or it is too long by now; what was said stays.
        """
        last = next((at for at in range(len(self.messages) - 1, -1, -1) if self.messages[at]["role"] == "user"), None)
        if last is None:
            raise DataError("there is no message to answer again", "say something first")
        return self._generate_answer(self.messages[last], self.messages[:last])

    def answer_message(self, text: str) -> Generator[str, None, None]:
        """Return the answer to `text`, which comes piece by piece; both are remembered.

        When the loop is left early, what was said so far is remembered.

        Raises:
            DataError: `text` alone is too long; nothing is remembered then.
            ConfigError: the form of the answer cannot be used; nothing is remembered then.
        """
        seen, self.attached = self.attached, []
        shown = {"images": seen} if seen else {}
        return self._generate_answer({"role": "user", "content": TAG * len(seen) + text, **shown}, list(self.messages))

    def _generate_answer(self, question: ChatTurn, earlier: list[ChatTurn]) -> Generator[str, None, None]:
        before = list(self.messages)
        self.messages[:] = [*earlier, question]
        try:
            prompt, pictures = self._fit_prompt(question["content"])
            request = self.engine.request(prompt, self._next_sampling(), name=self._prompt_name(), pictures=pictures)
        except UserError:
            self.messages[:] = before
            if len(earlier) == len(before):  # a new message: its pictures go with the next one
                self.attached[:0] = question.get("images", ())
            raise
        self.request = request
        self.num_answers += 1
        self.engine.submit([request])
        texts: list[str] = []
        try:
            for piece in self.engine.follow(request):
                texts.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(texts)})

    def _prompt_name(self) -> str:
        return "the system message with the question" if self.system and self.has_chat_template else "the message"

    def _next_sampling(self) -> Sampling:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + self.num_answers)

    def _fit_prompt(self, text: str) -> tuple[list[int], PromptPictures | None]:
        """Return the prompt; drop the oldest question and its answer until the new answer has room."""
        self.num_dropped = 0
        if not self.has_chat_template:
            self.messages[:] = self.messages[-1:]
            return encode_continuation(self.engine.tokenizer, text), None
        room = self.engine.max_len - min(self.sampling.max_new_tokens, self.engine.max_len // 2)
        prompt, pictures = self._encode_prompt()
        while len(prompt) > room and len(self.messages) > 1:
            count = next((n for n, m in enumerate(self.messages[1:], 1) if m["role"] == "user"), 1)
            del self.messages[:count]
            self.num_dropped += count
            prompt, pictures = self._encode_prompt()
        return prompt, pictures

    def _encode_prompt(self) -> tuple[list[int], PromptPictures | None]:
        turns, images = split_pictures(self.get_transcript())
        if self.pictures is None:
            return encode_chat(self.engine.tokenizer, turns), None
        return self.pictures.encode_row(turns, images, "the conversation")


def split_pictures(turns: Sequence[ChatTurn]) -> tuple[list[ChatTurn], list[str]]:
    """Return turns without their pictures, and all pictures in order: a row of `anabatic sft`."""
    plain = [{key: value for key, value in turn.items() if key != "images"} for turn in turns]
    return plain, [image for turn in turns for image in turn.get("images", ())]


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of plain text as a document's beginning: behind the token that separates documents."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ids if start is None else [start, *ids]
