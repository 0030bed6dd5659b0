"""`anabatic classify ...`: sequence classification and vessel trajectories."""

from anabatic.cli.job import job_command

pretrain = job_command("classify pretrain")
train = job_command("classify train")
predict = job_command("classify predict")
evaluate = job_command("classify eval")
