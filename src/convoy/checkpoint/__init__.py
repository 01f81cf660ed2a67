"""A checkpoint on disk: its files, written by one process or many, whole or not there; and a folder of them."""
