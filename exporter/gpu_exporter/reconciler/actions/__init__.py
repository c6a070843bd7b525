"""Taking GPUs back: what could be done to an underused holder, what must be proven first, and how it is done."""
