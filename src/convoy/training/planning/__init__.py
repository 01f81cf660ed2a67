"""From a recipe to a plan for the devices that there are."""
