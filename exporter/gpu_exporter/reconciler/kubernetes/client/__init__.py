"""The API server: requests, lists as a stream, leases, and the objects of one namespace."""
