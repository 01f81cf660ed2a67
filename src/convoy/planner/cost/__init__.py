"""What a plan costs: seconds of layers and collectives, the timeline of a step, memory of a rank.

Nothing here runs a network: times that were measured come in as numbers.
"""
