"""Tokens of rows, as a model's tokenizer and chat template make them. Imports torch, by way of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from anabatic.config.sections.train_jobs import PictureSizes
from anabatic.core.errors import DataError
from anabatic.data.chat import custom_templates
from anabatic.data.chat.loss_mask import LossTurns
from anabatic.data.chat.preference_pairs import split_pair_messages
from anabatic.data.chat.rendering import RenderedConversation, render_conversations
from anabatic.data.readers.document import Document, Message
from anabatic.data.tokenizer import hf_folder
from anabatic.data.vision.model_pictures import ModelPictures, make_renderer, read_model_pictures
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.models.vision.processor_files import find_processor_folder
from anabatic.plan import model_facts
from anabatic.plan.model_shape import sees_pictures


class RowTokenizer:
    """The tokenizer of a model with its chat template, and how the model wants its pictures.

    Args:
        chat_template: in place of the tokenizer's own.
        sizes: in place of the folder's own.

    Attributes:
        tokenizer: of transformers.
        rules: of pictures; None: the model sees none.

    Raises:
        ConfigError, DataError: the model, its tokenizer or the template cannot be used.
    """

    def __init__(self, model: str, chat_template: str | None, sizes: PictureSizes | None = None) -> None:
        root = resolve_model_folder(model)
        folder = find_tokenizer_folder(root, resolve_merged_adapters([], root))
        tokens = custom_templates.folder_with_template(folder, chat_template)
        self.tokenizer = hf_folder.load_tokenizer(tokens)
        self.rules: ModelPictures | None = None
        if sees_pictures(config := model_facts.read_local_config(model)):
            sizes, files = sizes or PictureSizes(), find_processor_folder(root, resolve_base_folder(root))
            self.rules = read_model_pictures(files, tokens, config, **sizes.get_bounds())
        self._renderer = None if self.rules is None else make_renderer(self.tokenizer, self.rules, None)

    def render(
        self, rows: Sequence[tuple[list[Message], Document]], turns: LossTurns = "assistant"
    ) -> list[RenderedConversation]:
        """Return conversations of rows as a training has them, with each picture's token as often as it has features.

        Raises:
            DataError: a conversation cannot be rendered, or a picture cannot be used.
        """
        conversations = [messages for messages, _ in rows]
        names, tools = [document.location for _, document in rows], [document.tools for _, document in rows]
        pictures = [document.pictures for _, document in rows]
        if self._renderer is not None:
            return self._renderer.render(conversations, pictures, names, tools, turns)
        if found := next((name for name, shown in zip(names, pictures, strict=True) if shown), None):
            raise DataError(f"{found}: the row has pictures, and the model sees none", "name a model that sees")
        return render_conversations(conversations, self.tokenizer, names, tools, turns)


def count_tokens(batch: Sequence[Document], rows: RowTokenizer) -> Iterator[tuple[int, int]]:
    """Yield tokens and target tokens of each row; of a pair, those of both answers.

    Raises:
        DataError: as of `RowTokenizer.render`.
    """
    sides = [_list_conversations(document) for document in batch]
    asked = [(messages, document) for document, row in zip(batch, sides, strict=True) for messages in row]
    rendered = iter(rows.render(asked))
    for document, row in zip(batch, sides, strict=True):
        if document.messages is None:
            count = len(rows.tokenizer(document.text or "", add_special_tokens=False)["input_ids"])
            yield count, count
        else:
            found = list(islice(rendered, len(row)))
            yield sum(len(one.ids) for one in found), sum(int(one.mask[1:].sum()) for one in found)


def _list_conversations(document: Document) -> list[list[Message]]:
    if document.messages is None:
        return []
    if document.rejected is None:
        return [document.messages]
    return [messages for messages in split_pair_messages(document) if messages]
