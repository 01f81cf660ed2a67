"""What comes after training: the report of a run and its plots, and scaling studies."""
