"""`anabatic pretrain`."""

from anabatic.cli.job_command import make_job_command

pretrain = make_job_command("pretrain")
