"""The state of this node, and the view of it that every renderer uses."""
