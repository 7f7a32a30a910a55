"""Ranks of one's own, and the terminal where a person looks at them."""
