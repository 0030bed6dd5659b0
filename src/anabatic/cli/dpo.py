"""`anabatic dpo`."""

from anabatic.cli.job import job_command

dpo = job_command("dpo")
