"""`anabatic classify ...`: sequence classification and vessel trajectories."""

from anabatic.cli.job import job_command

evaluate = job_command("classify eval")
