"""The digest: a usage report of a period by tenant and holder, compared with the period before."""
