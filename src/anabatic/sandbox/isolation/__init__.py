"""Isolation of programs: namespaces, Landlock, seccomp; standard library only."""
