"""What helps at the shell: completion of commands and options."""
