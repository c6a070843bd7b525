"""The configuration file: sections of settings that override the defaults, and the reconciler's ordered policies."""
