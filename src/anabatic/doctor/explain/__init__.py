"""Explanation of logs: matching lines with the knowledge base."""
