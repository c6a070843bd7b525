"""Puts the packages of the agent together. Only the command line imports it."""
