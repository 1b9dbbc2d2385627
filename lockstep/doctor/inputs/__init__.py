"""What the doctor reads: runs of ours, dumps of other trainers, and files in our own schema."""
