"""The commands that report the use of a period."""
