"""A tokenizer and a model that need no training, for tests of inference. Heavy libraries load when called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


BPE_MERGES = (("t", "h"), ("i", "n"), ("e", "r"), ("a", "n"), ("th", "e"), ("in", "g"))


def build_byte_tokenizer(folder: Path, merges: tuple[tuple[str, str], ...] = BPE_MERGES) -> PreTrainedTokenizerFast:
    """Save and load a byte-level tokenizer with the special tokens, the chat template and a few merges.

    It encodes any text; words are split at blanks and digits stand alone.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from anabatic.data.tokenizer import hf_folder as folders

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*folders.SPECIAL_TOKENS, *alphabet])}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in folders.SPECIAL_TOKENS
            if token not in folders.VISIBLE_SPECIAL_TOKENS
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token in folders.SPECIAL_TOKENS
            if token in folders.VISIBLE_SPECIAL_TOKENS
        ]
    )
    folders.save_tokenizer(tokenizer, folder)
    return folders.load_tokenizer(folder)


def build_random_model(vocab_size: int, *, seed: int = 0, max_len: int = 128, kv_heads: int = 2) -> PreTrainedModel:
    """Return a random Qwen3 (2 layers, width 32, 4 heads) with our attention, on the CPU in fp32.

    Its weights are large enough that the likeliest token depends on the context.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from anabatic.models.pretrained import prepare_model

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return prepare_model(model.train(False), torch.device("cpu"))


def iter_cached_logits(model: PreTrainedModel, texts: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Read texts of at most 24 tokens through a cache: a beginning, two more tokens, then one at a time.

    Yields the tokens read so far of each text, and the logits after them, `[n, V]`. Some blocks are consecutive, some
    are not.
    """
    import torch

    from anabatic.models import forward
    from anabatic.models.kv_cache import CacheRow, KVCache

    cache = KVCache(model.config, 3 * len(texts), 8, model.device, torch.float32, num_requests=len(texts))
    at = [0] * len(texts)
    for back in (5, 3, 2, 1, 0):
        rows = []
        for row, text in enumerate(texts):
            blocks = [3 * row + place for place in ((0, 1, 2) if row % 2 else (2, 0, 1))]
            runs = [(3 * row, 3)] if row % 2 else [(3 * row + 2, 1), (3 * row, 2)]
            end = len(text) - back
            shown = runs[: 1 if end <= 8 else 2]
            rows.append(CacheRow(text[at[row] : end], at[row], blocks, shown, state_slot=len(texts) - 1 - row))
            at[row] = end
        yield at, forward.extend_cache(model, rows, cache)
