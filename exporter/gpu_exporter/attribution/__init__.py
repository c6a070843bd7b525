"""Who holds what. Yields grants in the words of the sources and resolves them to units; never guesses by position."""
