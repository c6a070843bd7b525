"""Takes GPUs back: proposes actions on underused holders, checks the proofs that an action needs, and acts."""
