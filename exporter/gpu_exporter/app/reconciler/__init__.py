"""The commands of the reconciler, put together from its parts."""
