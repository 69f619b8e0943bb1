"""What each rank of a plan does, and doing it in memory: no library is known here."""
