"""Takes GPUs back: proposes acts on underused holders, checks the proofs that an act needs, and acts."""
