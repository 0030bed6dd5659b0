"""`anabatic serve`."""

from anabatic.cli.job_command import make_job_command

serve = make_job_command("serve")
