"""Finds the jobs on this node without slurmctld: by the files of prolog and epilog, and by the steps of slurmd."""
