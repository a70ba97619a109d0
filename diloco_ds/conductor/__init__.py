"""The conductor: prepares a run, starts its processes, keeps them running, and brings the run to its end."""
