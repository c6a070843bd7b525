"""Asks slurmctld for the data of all nodes from one process, so that the nodes need not ask."""
