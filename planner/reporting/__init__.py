"""Plans for people: why a plan is as it is, how two differ, a page of pictures. Reads plans and predictions; makes neither."""
