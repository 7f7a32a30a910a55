"""Tools: one command of ``mpips`` each."""
