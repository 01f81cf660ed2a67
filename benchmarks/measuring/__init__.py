"""What the benchmarks of several devices share: cases, sides, processes, emulated hosts, tables."""
