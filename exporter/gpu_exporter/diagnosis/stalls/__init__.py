"""Detects stalls: a GPU is fully busy although its holder makes no progress. Pure: no clock, no lock."""
