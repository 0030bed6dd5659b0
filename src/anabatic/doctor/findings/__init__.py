"""Findings of checks: messages and fixes, in English and Chinese."""
