"""`anabatic tokenizer train|eval`."""

from anabatic.cli.job_command import make_job_command

train = make_job_command("tokenizer train")
evaluate = make_job_command("tokenizer eval")
