"""The seam between running a plan and the library that moves its bytes, and one file a library."""
