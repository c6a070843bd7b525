"""What people read: the digest, and the table on a terminal."""
