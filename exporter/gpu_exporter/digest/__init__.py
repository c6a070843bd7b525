"""What a week of GPUs came to, for people: by tenant, by holder, against the week before."""
