"""State and evidence of an allocation, from snapshots and ledger views. Pure."""
