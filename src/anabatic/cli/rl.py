"""`anabatic rl`."""

from anabatic.cli.job_command import make_job_command

rl = make_job_command("rl")
