"""The holders of the units. Reads grants from the sources, and resolves each to a unit. Never guesses by position."""
