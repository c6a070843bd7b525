"""Usage report for a period, for people: by tenant, by holder, compared with the period before."""
