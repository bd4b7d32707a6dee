"""Commands that measure and print a table."""
