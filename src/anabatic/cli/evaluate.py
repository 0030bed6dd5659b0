"""`anabatic eval`."""

from anabatic.cli.job import job_command

evaluate = job_command("eval")
