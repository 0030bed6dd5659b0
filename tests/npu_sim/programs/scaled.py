"""Steps in fp16 from a loss scale that is far too large: which of them are made, and how the scale comes down."""

import functools
import itertools
import json
import warnings

import torch
import transformers

from anabatic.config.sections.common import DeviceSettings, Optim
from anabatic.data.batching.packing import Batch
from anabatic.device.device import select_device
from anabatic.models import forward, pretrained
from anabatic.parallel.world import World
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep

warnings.filterwarnings("ignore")
torch.manual_seed(0)
config = transformers.Qwen2Config(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    tie_word_embeddings=True,
)
model = transformers.AutoModelForCausalLM.from_config(config).float().to("npu:0")
model.config._attn_implementation = pretrained.ATTENTION_NAME
device, world = select_device(DeviceSettings(type="npu", dtype="fp16")), World()
optimizer = Optimizer(model, Optim(name="adamw"), LearningRates(1e-3, 0.0), device, world)
loss = functools.partial(forward.compute_summed_loss, chunk_bytes=512 << 20)
step = TrainStep(forward.ModelRoot(model), loss, optimizer, 64)
step.loss_scale.value.fill_(2.0**24)
ids = torch.randint(3, 128, (64,))
rows = Batch(ids, ids.clone(), torch.arange(64), [0, 64], 64, 64)
told = []
for _ in range(14):
    step.run_step(itertools.repeat(rows), 1, 1.0)
    drained = step.read_stats()
    told.append((drained.skipped, step.loss_scale.value.item(), round(drained.loss, 3)))
print(json.dumps(told))
