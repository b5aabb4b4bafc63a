"""Between the wire and the index: requests in, answers out, for server and local mode alike.

May import `api` and what lies below it.
"""
