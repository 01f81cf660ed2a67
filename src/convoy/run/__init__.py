"""What a run leaves: its folder, the records in it, and the trackers that are told of them."""
