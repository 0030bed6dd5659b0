"""`anabatic infer`."""

from anabatic.cli.job_command import make_job_command

infer = make_job_command("infer")
