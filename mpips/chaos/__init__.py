"""Faults as a test tool: jobs under the supervisor, what is done to them, and what must hold."""
