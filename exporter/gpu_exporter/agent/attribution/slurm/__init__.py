"""Jobs from Slurm: slurmctld, gres.conf, the steps on this node and the files of a prolog."""
