"""`anabatic dpo`."""

from anabatic.cli.job_command import make_job_command

dpo = make_job_command("dpo")
