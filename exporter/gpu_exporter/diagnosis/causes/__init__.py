"""The causes of low utilization, one file each: the evidence for a cause, the evidence against it, and the advice."""
