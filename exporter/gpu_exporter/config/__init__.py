"""The configuration file: sections of settings over the defaults, and the ordered policies of the reconciler."""
