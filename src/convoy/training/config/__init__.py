"""What the sections of a recipe are made of: typed, strict, and clear about what is wrong with them."""
