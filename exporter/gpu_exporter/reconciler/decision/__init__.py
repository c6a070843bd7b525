"""What follows from the evidence: pure, one holder at a time, unknown before idle."""
