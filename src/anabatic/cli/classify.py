"""`anabatic classify words|pretrain|train|predict|eval|map`."""

from anabatic.cli.job import job_command

pretrain = job_command("classify pretrain")
train = job_command("classify train")
evaluate = job_command("classify eval")
