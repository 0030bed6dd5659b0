"""`anabatic sft`."""

from anabatic.cli.job import job_command

sft = job_command("sft")
