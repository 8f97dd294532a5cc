"""Text output of commands: tables and sentences."""
