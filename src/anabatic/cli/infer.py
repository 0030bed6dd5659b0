"""`anabatic infer`."""

from anabatic.cli.job import job_command

infer = job_command("infer")
