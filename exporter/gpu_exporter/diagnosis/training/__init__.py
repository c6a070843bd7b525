"""Reports of training loops: how a job describes its own steps."""
