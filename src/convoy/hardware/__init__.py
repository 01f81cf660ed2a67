"""Devices, hosts and links that are not at hand: what is known of them, and how long a network takes on them."""
