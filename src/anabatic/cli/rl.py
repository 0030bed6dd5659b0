"""`anabatic rl`."""

from anabatic.cli.job import job_command

rl = job_command("rl")
