"""Published measurements beside what is predicted for them; `shardroute validate` prints them."""
