"""A tiny model that sees, made from a configuration, and pictures of colored shapes with questions about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 220), "white": (250, 250, 250)}
PATCH = {"qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen3_5": 16, "qwen3_5_moe": 16, "qwen2_5_vl": 14, "glm4v": 14,
         "glm4v_moe": 14, "glm46v": 14, "internvl": 32}  # fmt: skip
"""Side of a patch by family; of InternVL of a tile."""
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3-VL's, without tools."""


def make_config(family: str = "qwen3_vl", depth: int = 3, tie: bool = False) -> Any:
    """Return the configuration of a tiny model: of Qwen3-VL with features for three layers, of Qwen3.5 with a layer of
    the delta rule before one of attention."""
    if family == "internvl":
        return _make_tiled_config(depth, tie)
    sections = [1, 1, 2] if family == "qwen2_5_vl" else [2, 1, 1]
    text: dict[str, Any] = dict(
        vocab_size=288, hidden_size=32, intermediate_size=48, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=tie, pad_token_id=None,
        bos_token_id=None, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    )  # fmt: skip
    tower: dict[str, Any] = dict(
        depth=4, hidden_size=24, num_heads=2, intermediate_size=40, patch_size=PATCH[family], temporal_patch_size=2,
        spatial_merge_size=2, out_hidden_size=32, in_channels=3,
    )  # fmt: skip
    names = ("vision_start_token_id", "vision_end_token_id")
    if family.startswith("glm"):
        names = ("image_start_token_id", "image_end_token_id")
        text |= dict(hidden_size=64)
        del text["head_dim"]
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        tower |= dict(image_size=56, out_hidden_size=64)
    elif family == "qwen2_5_vl":
        tower |= dict(window_size=56, fullatt_block_indexes=[1, 3])
    else:
        tower |= dict(num_position_embeddings=16)
    if family.startswith("qwen3_vl"):
        tower |= dict(deepstack_visual_indexes=[0, 1, 2])
    if family.startswith("qwen3_5"):
        kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
        text |= dict(
            layer_types=kinds[:depth], linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_conv_kernel_dim=4, head_dim=16,
        )  # fmt: skip
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    if family == "glm4v_moe":
        text |= dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        )  # fmt: skip
    elif family.endswith("_moe"):
        text |= _EXPERTS | ({"shared_expert_intermediate_size": 16} if family == "qwen3_5_moe" else {})
    return AutoConfig.for_model(
        family, text_config=text, vision_config=tower, image_token_id=5, video_token_id=6, tie_word_embeddings=tie,
        **dict(zip(names, (3, 4), strict=True)),
    )  # fmt: skip


def _make_tiled_config(depth: int, tie: bool) -> Any:
    """Return the configuration of a tiny InternVL, with four tokens a tile."""
    text = dict(
        model_type="qwen3", vocab_size=288, hidden_size=32, intermediate_size=48, num_hidden_layers=depth,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=tie,
        pad_token_id=None, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    tower = dict(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, intermediate_size=40, image_size=PATCH["internvl"],
        patch_size=8, attention_bias=True,
    )  # fmt: skip
    return AutoConfig.for_model(
        "internvl", text_config=text, vision_config=tower, image_token_id=5, image_seq_length=4, tie_word_embeddings=tie
    )


def build_model(family: str = "qwen3_vl", dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Return transformers' own model of `make_config`, with weights large enough that pictures change its answers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = make_config(family, **options)
        config._experts_implementation = "eager"  # the grouped product of PyTorch takes no float64
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.to(dtype)


def build_tokenizer(is_tiled: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the tokens of pictures and the chat template, Qwen's or InternVL's."""
    vocabulary = {token: index for index, token in enumerate([*TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    more: dict[str, Any] = {}
    template = CHAT_TEMPLATE
    if is_tiled:
        names = dict(zip(("start_image_token", "end_image_token", "context_image_token"), TOKENS[3:6], strict=True))
        more["extra_special_tokens"] = names | {"video_token": TOKENS[6]}
        template = template.replace(TOKENS[3], "").replace(TOKENS[4], "\n")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template, **more
    )


def save_seeing_model(folder: Path, family: str = "qwen3_vl", **options: Any) -> Path:
    """Save the model with its tokenizer and the files of its processor; return the folder."""
    build_model(family, **options).save_pretrained(folder)
    return save_processor(folder, family)


def save_processor(folder: Path, family: str = "qwen3_vl") -> Path:
    """Save the tokenizer and the files of the processor alone; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    is_tiled = family == "internvl"
    build_tokenizer(is_tiled).save_pretrained(folder)
    unit = 2 * PATCH[family]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": unit**2, "longest_edge": 16 * unit**2}, "patch_size": PATCH[family],
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    if is_tiled:
        tiles = {"size": {"height": PATCH[family], "width": PATCH[family]}, "min_patches": 1, "max_patches": 6}
        processor = {"image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor", **tiles}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    halves = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    video = {"fps": 2, "size": {"shortest_edge": unit**2, "longest_edge": 64 * unit**2}, **halves}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def draw_shape(path: Path, color: str, shape: str, size: tuple[int, int] = (64, 64)) -> Path:
    """Draw a shape of that color on black: `square` or `circle`; return the path."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size)
    box = (size[0] // 8, size[1] // 8, size[0] * 7 // 8, size[1] * 7 // 8)
    draw = ImageDraw.Draw(image)
    (draw.rectangle if shape == "square" else draw.ellipse)(box, fill=COLORS[color])
    image.save(path)
    return path


def write_shapes(folder: Path, rows: int = 48, text_every: int = 0) -> Path:
    """Write pictures of all colors and shapes, and rows that ask for the color; return the file of the rows.

    Args:
        text_every: each so many rows one has no picture; 0: all have one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = ((64, 64), (96, 64), (64, 100), (150, 40))
    kinds = [(color, shape, size) for size in sizes for shape in ("square", "circle") for color in COLORS]
    lines = []
    for number in range(rows):
        color, shape, (width, height) = kinds[number % len(kinds)]
        name = f"{color}-{shape}-{width}.png"
        if not (folder / name).exists():
            draw_shape(folder / name, color, shape, (width, height))
        row: dict[str, Any] = {
            "messages": [
                {"role": "user", "content": f"<image>Which color has the {shape}?"},
                {"role": "assistant", "content": color},
            ],
            "images": [name],
        }
        if text_every and number % text_every == 0:
            row["messages"][0]["content"] = f"Row {number}: say {color}."
            del row["images"]
        lines.append(json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
