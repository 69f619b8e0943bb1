"""What two-sided and signalling libraries exchange for a plan, in an order that all ranks compute alike."""
