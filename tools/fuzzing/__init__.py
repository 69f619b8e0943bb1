"""What tools/fuzz.py is made of: readers with samples, how inputs are changed, and processes with limits that read them."""
