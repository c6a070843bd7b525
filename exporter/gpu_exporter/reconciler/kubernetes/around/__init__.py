"""Reads the surroundings of pods: routes, controllers, gangs, wishes of owners, and the class that they show."""
