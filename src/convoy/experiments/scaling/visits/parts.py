"""Where the time of an update goes, in the words of the files of a study."""

COMPUTE, COMMUNICATION, INPUT, OPTIMIZER = "compute", "communication", "input", "optimizer"
