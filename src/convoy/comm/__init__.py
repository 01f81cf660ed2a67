"""Communication: process groups, collectives, shared memory, and redistribution of tensors between layouts."""
