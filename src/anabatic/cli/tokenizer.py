"""`anabatic tokenizer train|eval`."""

from anabatic.cli.job import job_command

train = job_command("tokenizer train")
evaluate = job_command("tokenizer eval")
