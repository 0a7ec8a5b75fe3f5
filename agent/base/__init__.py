"""What every part of the agent shares: errors, exit codes, units, files and terminal output."""
