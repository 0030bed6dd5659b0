"""`anabatic classify words|pretrain|train|predict|eval|map`."""

from anabatic.cli.job import job_command

words = job_command("classify words")
pretrain = job_command("classify pretrain")
train = job_command("classify train")
predict = job_command("classify predict")
evaluate = job_command("classify eval")
draw = job_command("classify map")
