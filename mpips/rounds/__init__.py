"""Synchronous training: how gradients meet, and what is done with their sum."""
