"""`anabatic merge`."""

from anabatic.cli.job_command import make_job_command

merge = make_job_command("merge")
