"""`anabatic export`."""

from anabatic.cli.job import job_command

export = job_command("export")
