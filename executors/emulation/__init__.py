"""A cluster emulated on one machine: a process a rank, between them links of the rates that a topology states."""
