"""`anabatic pretrain`."""

from anabatic.cli.job import job_command

pretrain = job_command("pretrain")
