"""Fault injection: jobs under the supervisor, the faults they meet, and what must hold then."""
