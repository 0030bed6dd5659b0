"""Fine-tuning of a model that sees, in tokens per CPU second and memory, beside transformers' Trainer with PEFT.

    python benchmarks/vision.py [--rounds N] [--seconds S] [--threads N] [--rows N] [--scale N]

All sides train LoRA of rank 16 in the language model of the same Qwen3-VL (decoder of 4 layers and width 256, tower of
6 blocks and width 192, features behind three layers; 13 M parameters) on the same rows: JPEG pictures of many sizes,
one or two a row, and texts of many lengths, half of which are answers. The tower is frozen. Pictures are decoded,
resized and cut within the measured time on every side, but for one of ours that keeps them resized on the disk. The
Trainer pads to the longest row of a batch of four, and once more takes one row at a time. Ours: shards, `Loader`,
`TrainStep`, packed. `--scale` makes the files of the pictures larger, not what the model sees.

Tokens: real tokens that went through the decoder, those of pictures included, no padding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from option_types import positive_int, positive_number
from paired import Turns, alternate, in_own_process, table

MICRO_ROWS = 4
BATCH_TOKENS = 1024
SEQ_LEN = 640
RANK = 16
PEER = "Trainer + PEFT"


@dataclass(frozen=True)
class Task:
    """What a side trains."""

    folder: Path
    threads: int


def prepare(folder: Path, count: int, scale: int = 1) -> None:
    """Write a model, pictures of 64 to 479 times `scale` pixels a side, and rows."""
    import sys

    import numpy as np
    import torch
    from PIL import Image

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from transformers import AutoModelForImageTextToText

    from suite import tiny_vision

    config = tiny_vision.make_config(depth=4)
    for part, sizes in (
        (config.text_config, dict(hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4,
                                  head_dim=32, vocab_size=8192, max_position_embeddings=2048)),
        (config.vision_config, dict(hidden_size=192, intermediate_size=512, depth=6, num_heads=6, out_hidden_size=256,
                                    num_position_embeddings=576, deepstack_visual_indexes=[1, 3, 5])),
    ):  # fmt: skip
        for name, value in sizes.items():
            setattr(part, name, value)
    config.text_config.rope_parameters["mrope_section"] = [6, 5, 5]
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    tiny_vision.build_tokenizer().save_pretrained(folder / "model")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 4096, "longest_edge": 200_704}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    draw, noise = random.Random(0), np.random.default_rng(0)
    rows = []
    for number in range(count):
        names = []
        for index in range(draw.choice((1, 1, 2))):
            low = noise.integers(0, 255, (6, 6, 3)).astype(np.uint8)
            size = (scale * draw.randrange(64, 480), scale * draw.randrange(64, 480))
            names.append(f"{number}-{index}.jpg")
            Image.fromarray(low).resize(size).save(folder / names[-1])
        words = "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(8, 160)))
        answer = "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(8, 160)))
        turns = [
            {"role": "user", "content": "<image>" * len(names) + words},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": turns, "images": names})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(turns: Turns, task: Task, keeps_pictures: bool = False) -> None:
    """The path of the `sft` recipe, with the loop's log at every tenth step.

    Args:
        keeps_pictures: in the cache of `vision.cache_gib`.
    """
    import torch

    from anabatic.config.sections.common import DeviceSettings, Optim, Parallel
    from anabatic.config.sections.train_jobs import Lora, PictureData
    from anabatic.data.batching.loader import Loader
    from anabatic.data.chat.loss_mask import LossPolicy
    from anabatic.data.shards import dataset_cache
    from anabatic.data.vision.picture_cache import PictureCache
    from anabatic.data.vision.rule_files import read_picture_rules
    from anabatic.device.device import select_device
    from anabatic.models import fused_ops
    from anabatic.models.lora import adapter
    from anabatic.models.model_init import materialize_model
    from anabatic.models.pretrained import build_meta_causal_lm, load_folder_weights
    from anabatic.models.vision.model_parts import find_trained_prefixes
    from anabatic.parallel.sharding import resolve_sharding
    from anabatic.parallel.world import World
    from anabatic.train.objectives import make_next_token_objective, see_pictures
    from anabatic.train.optim.optimizer import LearningRates, Optimizer
    from anabatic.train.step import TrainStep

    device, world = select_device(DeviceSettings(type="cpu", threads=task.threads, dtype="fp32")), World()
    folder = task.folder / "model"
    model = build_meta_causal_lm(folder, device.dtype)
    rules = read_picture_rules(folder, model.config.to_dict())
    data = PictureData(cache=str(task.folder / "cache"), valid=["none"])
    shard = dataset_cache.build_dataset(
        str(task.folder / "rows.jsonl"), folder, data, "train", seq_len=SEQ_LEN, learning=LossPolicy(), pictures=rules
    )
    lora = Lora(r=RANK, alpha=32)
    adapter.insert_adapter(model, lora, find_trained_prefixes(model, ["language"]))
    root = materialize_model(model, resolve_sharding(Parallel(), world, device), device, world)
    load_folder_weights(model, folder)
    adapter.init_adapter_weights(model, lora, 0)
    fused_ops.apply_fused_setting(model, "auto", device.type)
    model.train()
    optim = Optim(name="adamw", weight_decay=0.0, beta2=0.999, eps=1e-8)
    optimizer = Optimizer(model, optim, LearningRates(1e-4, 0.0), device, world)
    if keeps_pictures:
        rules = replace(rules, cache=PictureCache(task.folder / "pictures", 1 << 30))
    objective = see_pictures(make_next_token_objective(root, device, world, SEQ_LEN), rules)
    step = TrainStep(root, objective.loss_fn, optimizer, BATCH_TOKENS, pack=objective.pack_batch)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
    options = {"seq_len": SEQ_LEN, "micro_batch_tokens": BATCH_TOKENS, "lay": objective.collate}
    with Loader([(shard, None)], **options) as loader:
        turns.begin(**facts)
        number = 0
        while True:
            batch = step.run_step(loader, 1, 1.0)
            number += 1
            if number % 10 == 0:
                step.read_stats()
            turns.step(batch.num_tokens)


def build_peer(data: Path, dtype: Any) -> tuple[Any, list[dict[str, Any]], Callable[..., dict[str, Any]]]:
    """Return PEFT's LoRA on transformers' model, the rows of `prepare`, and what makes a padded batch of some, with
    transformers' own image processor.

    The batch has a key "tokens", their number without padding, which its user takes out.
    """
    import peft
    import torch
    from PIL import Image
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = data / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    names = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = peft.get_peft_model(plain, peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
    pad_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = [json.loads(line) for line in (data / "rows.jsonl").read_text().splitlines()]

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        images = [Image.open(data / name).convert("RGB") for name in row["images"]]
        found = processor(images, return_tensors="pt")
        counts = (found["image_grid_thw"].prod(1) // 4).tolist()
        text = row["messages"][0]["content"].removeprefix("<image>" * len(images))
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
        asked = [{"role": "user", "content": shown + text}]
        whole = [*asked, row["messages"][1]]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(tokenizer.apply_chat_template(whole, return_dict=False))
        labels = ids.clone()
        labels[: len(prompt)] = -100
        return {"ids": ids, "labels": labels, **found}

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        encoded = [encode(row) for row in batch]
        ids = pad_sequence([one["ids"] for one in encoded], batch_first=True)
        mask = pad_sequence([torch.ones_like(one["ids"]) for one in encoded], batch_first=True)
        return {
            "tokens": sum(len(one["ids"]) for one in encoded),
            "input_ids": ids,
            "attention_mask": mask,
            "labels": pad_sequence([one["labels"] for one in encoded], batch_first=True, padding_value=-100),
            "mm_token_type_ids": (ids == pad_token).int(),
            "pixel_values": torch.cat([one["pixel_values"] for one in encoded]),
            "image_grid_thw": torch.cat([one["image_grid_thw"] for one in encoded]),
        }

    return model, rows, collate


def trainer(turns: Turns, task: Task, rows_at_once: int) -> None:
    """A plain Trainer, PEFT's LoRA, dynamic padding."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(task.threads)
    model, rows, encode = build_peer(task.folder, torch.float32)
    tokens: list[int] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        found = encode(batch)
        tokens.append(found.pop("tokens"))
        return found

    class Taking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin(parameters=sum(p.numel() for p in model.parameters()), threads=torch.get_num_threads())

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            each = MICRO_ROWS // rows_at_once
            first = (state.global_step - 1) * each
            turns.step(sum(tokens[first : first + each]))  # the loader makes its batches ahead

    arguments = TrainingArguments(
        output_dir=str(task.folder / "trainer"),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=MICRO_ROWS // rows_at_once,
        remove_unused_columns=False,
        max_steps=10**6,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=10,
        learning_rate=1e-4,
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[Taking()]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seconds", type=positive_number, default=6.0, help="length of a turn")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--rows", type=positive_int, default=200)
    parser.add_argument("--scale", type=positive_int, default=1, help="of the pictures' files")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(prepare, folder, options.rows, options.scale)
        task = Task(folder, options.threads)
        sides: dict[str, Any] = {
            PEER: (trainer, (task, MICRO_ROWS)),
            "Trainer, row by row": (trainer, (task, 1)),
            "anabatic": (ours, (task,)),
            "anabatic, pictures kept": (ours, (task, True)),
        }
        results = alternate(sides, options.rounds, options.seconds, warm_up=2 * options.seconds)
        facts = results[PEER].facts
        print(f"{facts['parameters'] / 1e6:.2f} M parameters, {facts['threads']} threads")
        table(results, PEER)
        print("  beside one row at a time:")
        one = "Trainer, row by row"
        table({"anabatic": results["anabatic"], one: results[one]}, one)
        print("  with resized pictures on the disk beside without:")
        kept = "anabatic, pictures kept"
        table({kept: results[kept], "anabatic": results["anabatic"]}, "anabatic")


if __name__ == "__main__":
    main()
