"""Which GPU an IDX means: gres.conf, where slurmd has it from, and which order was in force at what time."""
