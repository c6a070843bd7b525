"""The commands of the reconciler, built from its parts."""
