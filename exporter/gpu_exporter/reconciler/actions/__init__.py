"""Taking GPUs back: the acts that an underused holder allows, the proofs that an act needs, and the act itself."""
