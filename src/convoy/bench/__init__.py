"""Scaling studies: the same work on one device and on several, by several plans and beside other tools, in turns."""
