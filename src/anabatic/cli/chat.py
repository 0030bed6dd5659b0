"""`anabatic chat`."""

from anabatic.cli.job_command import make_job_command

chat = make_job_command("chat")
