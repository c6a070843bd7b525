"""Causes of low utilization, one file each: the required evidence, reasons for a lower confidence, and the advice."""
