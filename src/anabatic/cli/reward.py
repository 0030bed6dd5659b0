"""`anabatic reward`."""

from anabatic.cli.job_command import make_job_command

reward = make_job_command("reward")
