"""Reads the reports that training loops write about their own steps."""
