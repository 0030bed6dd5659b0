"""`anabatic reward`."""

from anabatic.cli.job import job_command

reward = job_command("reward")
