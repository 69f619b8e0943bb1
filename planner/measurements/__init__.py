"""What users measured - logs of nccl-tests and nvbandwidth, timelines of our own runs - and the calibration that it gives."""
