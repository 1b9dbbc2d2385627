"""Why is my KL high? Reads a run or any trainer's dump, and names the causes."""
