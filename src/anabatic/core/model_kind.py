"""Which models this program works with, told from config.json alone: decoders of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabatic.core.errors import DataError

_TOWERS = {
    "vision_config": "pictures", "visual": "pictures", "vision_tower": "pictures", "mm_vision_tower": "pictures",
    "img_processor": "pictures", "audio_config": "sound", "speech_config": "sound", "audio_processor": "sound",
    "thinker_config": "pictures and sound", "talker_config": "sound",
}  # fmt: skip
"""Key of config.json (transformers' configurations, 5.23; LLaVA's and Phi's own) -> what that part of a model reads."""
_ENCODERS = frozenset((
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
))  # fmt: skip


def require_text_decoder(config: Mapping[str, Any], name: str) -> None:
    """Make sure that a model reads text and writes it from left to right.

    Args:
        config: what config.json says.
        name: of the file, for errors.

    Raises:
        DataError: the model has towers for pictures or sound, or is an encoder.
    """
    towers = sorted({what for key, what in _TOWERS.items() if config.get(key)})
    if towers:
        raise DataError(
            f"{name}: {_called(config)} reads {' and '.join(towers)}, too, and only text is supported:"
            " what else it reads would be left out without a word",
            "use the text model of the family, such as Qwen3-8B in place of Qwen3-VL-8B",
        )
    if config.get("is_encoder_decoder"):
        raise DataError(
            f"{name}: {_called(config)} is an encoder with a decoder; only decoders are supported",
            "use a causal language model, such as Qwen3 or Llama",
        )
    if str(config.get("model_type")) in _ENCODERS and not config.get("is_decoder"):
        raise DataError(
            f"{name}: {_called(config)} is an encoder, which writes no text",
            "use a causal language model, such as Qwen3 or Llama",
        )


def _called(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else f"model_type {config.get('model_type')}"
