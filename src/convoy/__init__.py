"""Convoy: train convolutional networks on one to many devices, with the same result on every one of them."""

__version__ = "0.1.0"
