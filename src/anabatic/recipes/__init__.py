"""One story per command: run(job) names every step."""
