"""Answers over HTTP: `worker` runs the engines, `schema` says what may be asked, `app` answers."""
