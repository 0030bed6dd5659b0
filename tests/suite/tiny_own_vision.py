"""Tiny models that see and are not packed, made from configurations, with the files of their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

_COMMON = ("<pad>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes parts alone, as those of Llava and Idefics do."""
_CLIP = dict(
    model_type="clip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
    image_size=32, patch_size=8, projection_dim=16,
)  # fmt: skip
_SIGLIP = dict(_CLIP, model_type="siglip_vision_model")
_HALF = [0.5, 0.5, 0.5]
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": dict(
        tokens=["<image>"],
        config=dict(vision_config=_CLIP, image_token_id=3, image_token_index=3),
        image_processor=dict(
            image_processor_type="CLIPImageProcessor", size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        processor=dict(
            processor_class="LlavaProcessor", image_token="<image>", patch_size=8, num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
    ),
    "llava_next": dict(
        tokens=["<image>"],
        config=dict(
            vision_config=_CLIP, image_token_id=3, image_token_index=3, image_grid_pinpoints=[[32, 64], [64, 32]]
        ),
        image_processor=dict(
            image_processor_type="LlavaNextImageProcessor", size={"shortest_edge": 32},
            crop_size={"height": 32, "width": 32}, image_grid_pinpoints=[[32, 64], [64, 32]],
        ),
        processor=dict(
            processor_class="LlavaNextProcessor", image_token="<image>", patch_size=8, num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
    ),
    "idefics3": dict(
        tokens=["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
        + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
        config=dict(
            vision_config={key: value for key, value in _SIGLIP.items() if key not in ("model_type", "projection_dim")},
            image_token_id=3, scale_factor=2, pad_token_id=0,
        ),
        image_processor=dict(
            image_processor_type="Idefics3ImageProcessor", size={"longest_edge": 64}, image_mean=_HALF, image_std=_HALF,
            max_image_size={"longest_edge": 32}, do_image_splitting=True,
        ),
        processor=dict(processor_class="Idefics3Processor", image_seq_len=4),
    ),
    "gemma3": dict(
        tokens=["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        config=dict(
            vision_config=dict(_SIGLIP, vision_use_head=False), image_token_id=4, image_token_index=4,
            boi_token_index=3, eoi_token_index=5, mm_tokens_per_image=4,
        ),
        image_processor=dict(
            image_processor_type="Gemma3ImageProcessor", size={"height": 32, "width": 32}, image_mean=_HALF,
            image_std=_HALF,
        ),
        processor=dict(processor_class="Gemma3Processor", image_seq_length=4),
        names=dict(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>"),
    ),
}  # fmt: skip
"""By transformers' name: tokens of pictures, the first of which the template writes, and what the files hold."""


def build_own_model(family: str, dtype: torch.dtype = torch.float32, depth: int = 3) -> PreTrainedModel:
    """Return transformers' own model, with weights large enough that pictures change its answers."""
    text: dict[str, Any] = dict(
        model_type="gemma3_text" if family == "gemma3" else "qwen3", vocab_size=320, hidden_size=32,
        intermediate_size=48, num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    if family == "gemma3":
        text |= dict(
            sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"][:depth]
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, text_config=text, tie_word_embeddings=False, **FAMILIES[family]["config"])
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.to(dtype)


def build_own_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the family's tokens of pictures and a chat template."""
    tokens = [*_COMMON, *FAMILIES[family]["tokens"]]
    vocabulary = {token: index for index, token in enumerate([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    names = FAMILIES[family].get("names")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>",
        chat_template=_TEMPLATE.replace("IMAGE", tokens[3]), **({"extra_special_tokens": names} if names else {}),
    )  # fmt: skip


def save_own_model(folder: Path, family: str, **options: Any) -> Path:
    """Save the model with its tokenizer and the files of its processor; return the folder."""
    build_own_model(family, **options).save_pretrained(folder)
    build_own_tokenizer(family).save_pretrained(folder)
    image = FAMILIES[family]["image_processor"]
    processor = FAMILIES[family]["processor"]
    files = {"preprocessor_config.json": image | {"processor_class": processor["processor_class"]}}
    for name, values in (files | {"processor_config.json": processor}).items():
        (folder / name).write_text(json.dumps(values))
    return folder


def build_own_processor(family: str) -> Any:
    """Return transformers' processor, made of its parts without any file."""
    import transformers

    image, own = (dict(FAMILIES[family][key]) for key in ("image_processor", "processor"))
    kind = getattr(transformers, own.pop("processor_class"))
    pixels = getattr(transformers, image.pop("image_processor_type") + "Pil")(**image)
    tokenizer = build_own_tokenizer(family)
    return kind(image_processor=pixels, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **own)
