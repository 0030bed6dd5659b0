"""Forward and backward of LoRA on a Qwen2 of four layers and 1,024 packed tokens in bf16; a step is one of both.

With `adamw` as argument also clipping and the update, as torch does them for lists of tensors.
"""

import sys
import warnings

import torch
import transformers

from anabatic.config.tuner import Lora
from anabatic.data.batch import Batch
from anabatic.models import adapter, attention, forward, fuse

warnings.filterwarnings("ignore")
LENGTHS = [100, 200, 300, 424]

torch.manual_seed(0)
config = transformers.Qwen2Config(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=704,
    tie_word_embeddings=True,
)
model = transformers.AutoModelForCausalLM.from_config(config).to("npu:0", torch.bfloat16)
model.config._attn_implementation = attention.NAME
adapter.insert(model, Lora(r=16), 0)
print(fuse.settle(model, "auto", "npu"))
loss_model = forward.LossModel(model, 512 << 20)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
borders = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
positions = torch.cat([torch.arange(n) for n in LENGTHS])
for _ in range(4):
    ids = torch.randint(3, 4096, (borders[-1],))
    rows = Batch(ids, ids.clone(), positions, borders, borders[-1], borders[-1])
    with torch.profiler.record_function("anabatic.step"):
        loss_model(forward.pack(rows, torch.device("npu:0"))).backward()
        if sys.argv[1:] == ["adamw"]:
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
            optimizer.step()
        for parameter in trained:
            parameter.grad = None
