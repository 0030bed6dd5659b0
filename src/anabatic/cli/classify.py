"""`anabatic classify words|pretrain|train|predict|eval|map`."""

from anabatic.cli.job_command import make_job_command

words = make_job_command("classify words")
pretrain = make_job_command("classify pretrain")
train = make_job_command("classify train")
predict = make_job_command("classify predict")
evaluate = make_job_command("classify eval")
draw = make_job_command("classify map")
