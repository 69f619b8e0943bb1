"""How other planners route, to be laid beside ours: the published M2N library itself, and others' rules in our own words."""
