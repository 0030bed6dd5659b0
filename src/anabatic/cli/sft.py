"""`anabatic sft`."""

from anabatic.cli.job_command import make_job_command

sft = make_job_command("sft")
