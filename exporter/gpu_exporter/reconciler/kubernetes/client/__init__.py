"""The API server: requests, lists as a stream, Leases, and the objects of one namespace."""
