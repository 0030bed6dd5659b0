"""Make a tiny Stable Diffusion with rows to train on, or print the losses that a run of diffusers has logged.

python diffusers_rows.py make FOLDER      # FOLDER/model, FOLDER/images
python diffusers_rows.py losses FOLDER    # of the TensorBoard files below it
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from inputs import make_tokenizer, sentence

SIZE = 64
"""Of an image; the VAE halves it."""


def make_images(folder: Path) -> None:
    """Write eight images of two colours, and their captions."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True)
    source = random.Random(1)
    rows = []
    for number in range(8):
        first, second = (tuple(source.randrange(256) for _ in range(3)) for _ in range(2))
        image = Image.new("RGB", (SIZE, SIZE), first)
        ImageDraw.Draw(image).ellipse((8 + number, 8, 40, 40 + number), fill=second)
        image.save(folder / f"{number}.png")
        rows.append(json.dumps({"file_name": f"{number}.png", "text": sentence(source, 6)}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def make_model(folder: Path) -> None:
    """Make the parts of a Stable Diffusion, of width 32, with random weights."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(1)
    blocks = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    UNet2DConditionModel(
        sample_size=SIZE // 2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **blocks,
    ).save_pretrained(folder / "unet")
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **blocks,
    ).save_pretrained(folder / "vae")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = CLIPTextConfig(vocab_size=512, max_position_embeddings=77, bos_token_id=1, eos_token_id=2, **sizes)
    CLIPTextModel(text).save_pretrained(folder / "text_encoder")
    DDPMScheduler(beta_schedule="scaled_linear").save_pretrained(folder / "scheduler")
    parts = folder / "bpe"
    make_tokenizer(folder / "qwen", parts)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = str(parts / "vocab.json"), str(parts / "merges.txt")
    CLIPTokenizer(*files, unk_token="<|endoftext|>", model_max_length=77, **names).save_pretrained(folder / "tokenizer")


def print_losses(folder: Path) -> None:
    """Print what was logged as train_loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (path for path in folder.rglob("events.out.tfevents.*") if "train_loss" in _tags(path))
    events = EventAccumulator(str(file)).Reload()
    for event in events.Scalars("train_loss"):
        print(f"train_loss {event.value:.7f}")


def _tags(path: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: list[str] = EventAccumulator(str(path)).Reload().Tags()["scalars"]
    return tags


def main() -> None:
    """Do what the first argument says."""
    folder = Path(sys.argv[2])
    if sys.argv[1] == "losses":
        print_losses(folder)
        return
    make_images(folder / "images")
    (folder / "model").mkdir()
    make_model(folder / "model")


if __name__ == "__main__":
    main()
