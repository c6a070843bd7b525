"""Asks slurmctld for the data of all nodes from one process, so that the nodes do not have to ask."""
