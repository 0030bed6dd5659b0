"""Whole steps of LoRA on a Qwen2 of four layers and 1,024 packed tokens in bf16, clipping and update included."""

import functools
import itertools
import warnings

import torch
import transformers

from anabatic.config.sections.common import DeviceSettings, Optim
from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import Batch
from anabatic.device.device import select_device
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.lora import adapter
from anabatic.parallel.world import World
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep

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
model.config._attn_implementation = pretrained.ATTENTION_NAME
settings = Lora(r=16)
adapter.insert_adapter(model, settings)
adapter.init_adapter_weights(model, settings, 0)
print(fused_ops.apply_fused_setting(model, "auto", "npu"))
device, world = select_device(DeviceSettings(type="npu")), World()
optimizer = Optimizer(model, Optim(name="adamw"), LearningRates(1e-4, 0.0), device, world)
loss = functools.partial(forward.compute_summed_loss, chunk_bytes=512 << 20)
step = TrainStep(forward.ModelRoot(model), loss, optimizer, 1024)
borders = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
positions = torch.cat([torch.arange(n) for n in LENGTHS])
ids = torch.randint(3, 4096, (borders[-1],))
rows = Batch(ids, ids.clone(), positions, borders, borders[-1], borders[-1])
for _ in range(4):
    step.run_step(itertools.repeat(rows), 1, 1.0)
