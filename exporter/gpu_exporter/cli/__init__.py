"""The command line: each command has a file with its flags and its call. Start at main.py."""
