"""Tokens of rows, as a model's tokenizer and chat template make them. Imports torch, by way of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from anabatic.data.chat import custom_templates
from anabatic.data.chat.preference_pairs import split_pair_messages
from anabatic.data.chat.rendering import render_conversations
from anabatic.data.readers.document import Document, Message
from anabatic.data.tokenizer import hf_folder
from anabatic.models.pretrained import find_tokenizer_folder, resolve_merged_adapters, resolve_model_folder


def load_tokenizer(model: str, chat_template: str | None) -> Any:
    """Return the tokenizer of a model, with the given chat template in place of its own.

    Raises:
        ConfigError, DataError: the model, its tokenizer or the template cannot be used.
    """
    root = resolve_model_folder(model)
    folder = find_tokenizer_folder(root, resolve_merged_adapters([], root))
    return hf_folder.load_tokenizer(custom_templates.folder_with_template(folder, chat_template))


def count_tokens(batch: Sequence[Document], tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Yield tokens and target tokens of each row; of a pair, those of both answers.

    Raises:
        DataError: a conversation cannot be rendered.
    """
    sides = [_list_conversations(document) for document in batch]
    rendered = iter(
        render_conversations(
            [messages for row in sides for messages in row],
            tokenizer,
            [document.location for document, row in zip(batch, sides, strict=True) for _ in row],
            [document.tools for document, row in zip(batch, sides, strict=True) for _ in row],
        )
    )
    for document, row in zip(batch, sides, strict=True):
        if document.messages is None:
            count = len(tokenizer(document.text or "", add_special_tokens=False)["input_ids"])
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
