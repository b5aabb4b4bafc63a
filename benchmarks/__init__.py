"""The project against its peers and against the machine's limits: python -m benchmarks NAME ..."""
