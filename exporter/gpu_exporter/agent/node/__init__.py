"""The state of this node, and the view (its state at one moment) that every renderer uses."""
