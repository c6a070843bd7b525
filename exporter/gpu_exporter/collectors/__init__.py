"""One concern a file: what it reads, and the families it publishes, as data."""
