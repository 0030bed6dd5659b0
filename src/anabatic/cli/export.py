"""`anabatic export`."""

from anabatic.cli.job_command import make_job_command

export = make_job_command("export")
