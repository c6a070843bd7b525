"""Causes of low utilization, one file each: the evidence it needs, what speaks against it, its advice."""
