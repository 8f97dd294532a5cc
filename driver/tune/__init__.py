"""Search for schedules, and who measures them."""
