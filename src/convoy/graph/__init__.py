"""A network as a list of calls with shapes; knows nothing of devices."""
