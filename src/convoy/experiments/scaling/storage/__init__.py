"""What is kept of a study, after every measurement."""
