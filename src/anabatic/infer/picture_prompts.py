"""Conversations with pictures as prompts of the engine: tokens, and what the tower reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.data.vision.picture_batch import read_pictures
from anabatic.data.vision.picture_encoder import PictureTexts, expand_pictures, measure_pictures
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.models.vision.prompt_pictures import PromptPictures


def make_picture_reader(tokenizer: Any, rules: PictureRules | None) -> PictureReader | None:
    """Return what reads pictures for a model; None: it sees none, or has no chat template."""
    return None if rules is None or not tokenizer.chat_template else PictureReader(tokenizer, rules)


class PictureReader:
    """Reads the pictures of conversations as one model wants them.

    Args:
        tokenizer: the model's, with a chat template.

    Attributes:
        picture_text: what the chat template writes for a picture.
        rules: how the model wants its pictures.

    Raises:
        DataError: the tokenizer lacks the tokens of pictures.
    """

    def __init__(self, tokenizer: Any, rules: PictureRules) -> None:
        self._tokenizer, self.rules = tokenizer, rules
        self._texts = PictureTexts(tokenizer, rules)
        self.picture_text = self._texts.picture

    def encode_row(
        self, messages: list[dict[str, Any]], pictures: Sequence[str], name: str, **chat: Any
    ) -> tuple[list[int], PromptPictures | None]:
        """Return the prompt of turns in which tags stand for pictures; arguments and errors as of `encode_turns`."""
        ids, grids = self.measure_row(messages, pictures, name, **chat)
        return ids, self.read(ids, grids)

    def encode_turns(
        self, messages: list[dict[str, Any]], pictures: Sequence[str], name: str, **chat: Any
    ) -> tuple[list[int], PromptPictures | None]:
        """Return the prompt of turns in which `picture_text` stands for pictures.

        Args:
            pictures: paths and data URIs, in the order of the turns.
            name: of the conversation, for messages.
            chat: further arguments of `encode_chat`.

        Raises:
            DataError: a picture cannot be used, or their number is not that of their places.
        """
        ids, grids = self.measure_turns(messages, pictures, name, **chat)
        return ids, self.read(ids, grids)

    def measure_turns(
        self, messages: list[dict[str, Any]], pictures: Sequence[str], name: str, **chat: Any
    ) -> tuple[list[int], list[PictureGrid]]:
        """Return the tokens of turns and the sizes of their pictures, which are read later; as `encode_turns`."""
        (measured,) = measure_pictures([tuple(pictures)], [name], self.rules)
        grids = [one.grid for one in measured]
        return self._encode(messages, grids, name, **chat), grids

    def measure_row(
        self, messages: list[dict[str, Any]], pictures: Sequence[str], name: str, **chat: Any
    ) -> tuple[list[int], list[PictureGrid]]:
        """Return the tokens of turns in which tags stand for pictures and videos, and the sizes of these in order; as
        `encode_turns`."""
        ((placed, grids),) = self._texts.place_rows([messages], [tuple(pictures)], [name])
        return self._encode(placed, grids, name, **chat), grids

    def _encode(
        self, messages: list[dict[str, Any]], grids: Sequence[PictureGrid], name: str, **chat: Any
    ) -> list[int]:
        ids = np.asarray(encode_chat(self._tokenizer, messages, **chat), dtype=np.int64)
        expanded: list[int] = expand_pictures(ids, grids, self._texts, name)[0].tolist()
        return expanded

    def read(self, ids: Sequence[int], grids: Sequence[PictureGrid]) -> PromptPictures | None:
        """Return the pictures of a prompt; None: there are none.

        Raises:
            DataError: one is not what it was when it was measured.
        """
        if not grids:
            return None
        tokens = np.asarray(ids, dtype=np.int64)
        return PromptPictures(tokens, self.rules.find_features(tokens), read_pictures(tokens, grids, self.rules))
