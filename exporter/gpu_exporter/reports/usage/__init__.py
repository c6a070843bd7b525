"""The use of GPUs in a past period: one model for all sources, its sums, and its output."""
