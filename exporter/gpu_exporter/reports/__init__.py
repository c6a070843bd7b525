"""Reports for people: the digest, and the table on a terminal."""
