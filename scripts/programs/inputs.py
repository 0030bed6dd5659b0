"""Make tiny models with a tokenizer, and rows to train on, with the transformers of a program's environment.

python inputs.py FOLDER    # FOLDER/qwen2, FOLDER/llama, FOLDER/bpe, and one JSON-lines file per kind of row
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TEXT = (
    "the ship sails from harbour to open water while wind and tide push north then a pilot boat meets it near p"
    "ort and takes the line one two three four five six seven eight nine ten plus minus equals answer question"
)
WORDS = TEXT.split()
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 64


def sentence(source: random.Random, words: int = 12) -> str:
    """Return random words."""
    return " ".join(source.choice(WORDS) for _ in range(words))


def write_rows(folder: Path) -> None:
    """Write rows of the usual kinds, each in a folder of its own as `datasets` loads them."""
    source = random.Random(1)
    kinds: dict[str, list[dict[str, object]]] = {
        name: [] for name in ("text", "chat", "dpo", "prompt", "alpaca", "swift")
    }
    for _ in range(ROWS):
        ask, good, bad = sentence(source, 6), sentence(source), sentence(source)
        user = {"role": "user", "content": ask}
        kinds["text"].append({"text": f"{ask}. {good}."})
        kinds["chat"].append({"messages": [user, {"role": "assistant", "content": good}]})
        kinds["dpo"].append(
            {
                "prompt": [user],
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
        )
        kinds["prompt"].append({"prompt": [user], "solution": good})
        kinds["alpaca"].append({"instruction": ask, "input": "", "output": good, "chosen": good, "rejected": bad})
        answer = {"role": "assistant", "content": good}
        kinds["swift"].append({"messages": [user, answer], "rejected_response": bad})
    for name, rows in kinds.items():
        (folder / name).mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.json").write_text(text, encoding="utf-8")
    # LLaMA-Factory finds data sets by name in this file.
    pairs = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    table = {
        "sft_rows": {"file_name": "alpaca/train.json"},
        "dpo_rows": {"file_name": "alpaca/train.json", "ranking": True, "columns": pairs},
    }
    (folder / "dataset_info.json").write_text(json.dumps(table), encoding="utf-8")


def make_tokenizer(folder: Path, parts: Path) -> None:
    """Train a byte-level tokenizer on the words above, store it as Qwen's is stored, and its vocabulary in `parts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    base.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    parts.mkdir(exist_ok=True)
    base.model.save(str(parts))  # vocab.json and merges.txt, which torchtune reads


def make_models(folder: Path) -> None:
    """Make a Qwen2 and a Llama of two layers and width 64."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    for name, config in (("qwen2", Qwen2Config(**sizes)), ("llama", LlamaConfig(**sizes))):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name)
        make_tokenizer(folder / name, folder / "bpe")


def main() -> None:
    """Write everything into the folder of the first argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_rows(folder)
    make_models(folder)


if __name__ == "__main__":
    main()
