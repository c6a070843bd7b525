"""What several products need."""
