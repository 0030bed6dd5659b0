"""`anabatic serve`."""

from anabatic.cli.job import job_command

serve = job_command("serve")
