"""What the training loops of holders report of themselves."""
