"""Synchronous training: sums of gradients, and updates by them."""
