"""Search for schedules, and the fleets that measure them."""
