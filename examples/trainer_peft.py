"""LoRA fine-tuning with the Hugging Face Trainer and PEFT, on whatever device torch finds.

    python examples/trainer_peft.py                                   # CPU, CUDA or NPU
    anabatic sim --npus 1 -- python examples/trainer_peft.py          # a simulated NPU
    anabatic sim --npus 2 -- torchrun --nproc_per_node 2 examples/trainer_peft.py

Without `--model` a tiny random model is built, so that nothing is downloaded. Needs accelerate and peft.
"""

import argparse

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Sums(Dataset):
    """Small additions as text."""

    def __init__(self, tokenizer, count):
        pairs = [(i % 10, (i // 10) % 10) for i in range(count)]
        lines = [f"{WORDS[a]} plus {WORDS[b]} is {a + b + 2}" for a, b in pairs]
        self.rows = [tokenizer(line, truncation=True, max_length=64) for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {key: self.rows[index][key] for key in ("input_ids", "attention_mask")}


def load(name):
    if name:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = ByT5Tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return Qwen2ForCausalLM(config), tokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model folder or hub name")
    parser.add_argument("--output", default="out/trainer_peft")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    set_seed(0)
    model, tokenizer = load(args.model)
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            bf16=args.bf16,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            save_total_limit=1,
            dataloader_num_workers=0,
            report_to="none",
            seed=0,
        ),
        train_dataset=Sums(tokenizer, 80),
        eval_dataset=Sums(tokenizer, 16),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    result = trainer.train()
    trainer.save_model()

    model.eval()
    prompt = tokenizer("one plus two is", return_tensors="pt", add_special_tokens=False).to(model.device)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    if trainer.is_world_process_zero():
        print(f"device {model.device}, loss {result.training_loss:.4f}, answer {tokenizer.decode(answer[0])!r}")


if __name__ == "__main__":
    main()
