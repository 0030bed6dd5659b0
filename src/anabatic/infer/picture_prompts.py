"""Conversations with pictures as prompts of the engine: tokens, and what the tower reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.data.vision.picture_batch import read_pictures
from anabatic.data.vision.picture_encoder import count_repeats, find_picture_text, measure_pictures, place_pictures
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.models.vision.prompt_pictures import PromptPictures


class PictureReader:
    """Reads the pictures of conversations as one model wants them.

    Args:
        tokenizer: the model's, with a chat template.

    Attributes:
        picture_text: what the chat template writes for a picture.

    Raises:
        DataError: the tokenizer lacks the tokens of pictures.
    """

    def __init__(self, tokenizer: Any, rules: PictureRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self.picture_text = find_picture_text(tokenizer, rules)

    def encode_row(
        self,
        messages: list[dict[str, Any]],
        pictures: Sequence[str],
        name: str,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[list[int], PromptPictures | None]:
        """Return the prompt of turns in which tags stand for pictures; arguments and errors as of `encode_turns`."""
        return self.encode_turns(place_pictures(messages, pictures, name, self.picture_text), pictures, name, tools)

    def encode_turns(
        self,
        messages: list[dict[str, Any]],
        pictures: Sequence[str],
        name: str,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], PromptPictures | None]:
        """Return the prompt of turns in which `picture_text` stands for pictures.

        Args:
            pictures: paths and data URIs, in the order of the turns.
            name: of the conversation, for messages.
            variables: of the chat template.

        Raises:
            DataError: a picture cannot be used, or their number is not that of their places.
        """
        (grids,) = measure_pictures([tuple(pictures)], [name], self._rules)
        ids = np.asarray(encode_chat(self._tokenizer, messages, tools, variables=variables), dtype=np.int64)
        ids = np.repeat(ids, count_repeats(ids, grids, self._rules, name))
        if not grids:
            return ids.tolist(), None
        batch = read_pictures(ids, grids, self._rules)
        return ids.tolist(), PromptPictures(ids, ids == self._rules.image_token, batch)
