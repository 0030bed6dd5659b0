"""`anabatic chat`."""

from anabatic.cli.job import job_command

chat = job_command("chat")
