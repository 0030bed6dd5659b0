"""`anabatic merge`."""

from anabatic.cli.job import job_command

merge = job_command("merge")
