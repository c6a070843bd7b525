"""The time that a reading covers, and the activity that it shows: driver rings, witnesses, GPM."""
