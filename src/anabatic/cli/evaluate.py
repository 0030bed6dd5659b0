"""`anabatic eval`."""

from anabatic.cli.job_command import make_job_command

evaluate = make_job_command("eval")
