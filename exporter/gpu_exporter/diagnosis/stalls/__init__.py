"""The search for stalls: a GPU that is fully busy although its holder makes no progress. Pure: no clock, no lock."""
