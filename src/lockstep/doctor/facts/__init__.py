"""Facts: two records of a dump that contradict each other. Exact; none has a limit to set."""
